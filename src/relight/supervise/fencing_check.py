"""Checks in a run's log whether another job's ranks have taken the run over.

Rank 0 of each attempt writes a FENCE record.
"""

from __future__ import annotations

from collections.abc import Collection

from relight.errors import RelightError
from relight.format.records import FenceBody
from relight.log import Log, LogView
from relight.store import ByteStore
from relight.supervise.within import within

PATIENCE_S = 1.0


def superseded(view: LogView, own: Collection[str]) -> bool:
    """Return whether a process outside ``own`` (each ``HOST:PID``) wrote the last FENCE, after one of ``own``."""
    fences = [record.writer.rpartition(":")[0] for record in view.records if isinstance(record.body, FenceBody)]
    return bool(fences) and fences[-1] not in own and any(writer in own for writer in fences)


def taken_over(store: ByteStore, run: str, own: Collection[str], patience_s: float = PATIENCE_S) -> bool:
    """Read a run's log and return ``superseded``.

    Return False if the log cannot be read within ``patience_s``, because a restart does not wait for a store.
    """
    try:
        return within(patience_s, lambda: superseded(Log(store, run).read(), own), False)
    except (RelightError, OSError):
        return False
