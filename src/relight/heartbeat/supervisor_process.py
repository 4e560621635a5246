"""Whether the supervisor that started this process, ``relight run``, still runs."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

_PF_EXITING = 0x4
"""Flag of a thread in ``/proc/PID/stat``: it has begun to exit."""


class _Supervision(NamedTuple):
    """Process ids of a rank and of its supervisor."""

    rank: int
    supervisor: int


_supervision: _Supervision | None = None
"""The supervisor of this process: set at its start, read by its signal handlers."""


def record_supervisor(pid: int) -> None:
    """Record that ``pid``, the parent of this process, supervises it."""
    global _supervision
    _supervision = _Supervision(os.getpid(), pid)


def is_supervisor_gone() -> bool:
    """Return whether this process was started by a supervisor that has ended since, or is ending.

    False in a forked child, and in a process without a supervisor.
    """
    if _supervision is None or _supervision.rank != os.getpid():
        return False
    return _supervision.supervisor != os.getppid() or _is_ending(_supervision.supervisor)


def _is_ending(pid: int) -> bool:
    """Return whether the main thread of a process has begun to exit.

    The kernel sends a child the signal for its parent's end when that thread exits. Until the last thread of the parent
    has exited, the child still has that parent.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
        return fields[0] in (b"Z", b"X") or bool(int(fields[6]) & _PF_EXITING)
    except (OSError, IndexError, ValueError):
        return False
