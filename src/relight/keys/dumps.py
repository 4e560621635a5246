"""Keeping keys out of core dumps."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

KEEP = "RELIGHT_CORE_DUMPS"
_PR_SET_DUMPABLE = 4


def keep_out_of_core_dumps(*, whole: bool = False) -> None:
    """Have this process leave no core dump, as its memory holds keys; ``RELIGHT_CORE_DUMPS=1`` leaves that alone.

    A limit of one byte, as Linux takes none at all for "no limit" where dumps go to a program. ``whole``: nor may another process of the
    same user look into it, which debuggers, and some transports between training processes, do: for processes of our own.
    """
    if os.environ.get(KEEP, "").lower() in ("1", "true", "yes"):
        return
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (1 if most == resource.RLIM_INFINITY or most >= 1 else 0, most))
    if whole:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
