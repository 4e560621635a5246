"""Whether a run has passed to somebody else's ranks: by its log, where who takes charge writes a FENCE."""

from __future__ import annotations

import threading
from collections.abc import Collection

from relight.errors import RelightError
from relight.format.records import FenceBody
from relight.log import Log, LogView
from relight.store import ByteStore

PATIENCE_S = 1.0


def superseded(view: LogView, own: Collection[str]) -> bool:
    """Whether one of ``own`` (``HOST:PID``) was in charge, and another than these has taken charge behind it."""
    fences = [record.writer.rpartition(":")[0] for record in view.records if isinstance(record.body, FenceBody)]
    return bool(fences) and fences[-1] not in own and any(one in own for one in fences)


def taken_over(store: ByteStore, run: str, own: Collection[str], patience_s: float = PATIENCE_S) -> bool:
    """The same of a run's log, if that can be read within ``patience_s``: a restart does not wait for a slow store."""
    found: list[bool] = []

    def look() -> None:
        try:
            found.append(superseded(Log(store, run).read(), own))
        except (RelightError, OSError):
            return

    thread = threading.Thread(target=look, name="relight-in-charge", daemon=True)
    thread.start()
    thread.join(patience_s)
    return found == [True]
