"""What the driver tells the recorder; its own file so that the driver need not import torch."""

from __future__ import annotations

import msgspec


class RecorderConfig(msgspec.Struct, kw_only=True):
    """What the driver wants. The run ends after step ``stop_after``, by SIGKILL behind a save if ``kill``.

    ``seed`` is for generators the script does not seed itself; the resumed run gets another one, so that nothing agrees by luck.
    """

    trace: str
    kinds: str
    store: str
    run: str
    record_from: int
    stop_after: int
    kill: bool
    seed: int
