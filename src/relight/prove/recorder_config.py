"""Configuration of the recorder. In its own file, so that the driver need not import torch."""

from __future__ import annotations

import msgspec


class RecorderConfig(msgspec.Struct, kw_only=True):
    """Configuration of one run. The run ends after step ``stop_after``; with ``kill``, it then saves and ends by SIGKILL.

    ``seed``: for generators that the script does not seed itself. The resumed run gets another seed, so that no values agree by chance.
    """

    trace: str
    kinds: str
    store: str
    run: str
    record_from: int
    stop_after: int
    kill: bool
    seed: int
