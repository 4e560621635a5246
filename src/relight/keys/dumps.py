"""Keep keys out of core dumps."""

from __future__ import annotations

import contextlib
import ctypes
import resource

from relight.errors import ConfigError
from relight.settings.environment import environment

_PR_SET_DUMPABLE = 4


def keep_out_of_core_dumps(*, whole: bool = False) -> None:
    """Disable core dumps of this process, because its memory has keys. ``RELIGHT_CORE_DUMPS=1`` disables this function.

    The limit is one byte: if dumps are piped to a program, Linux ignores a limit of zero. ``whole`` also forbids other processes of the
    same user to read this process's memory. Debuggers and some transports between training processes need that access, so ``whole`` is
    only for Relight's own processes.
    """
    with contextlib.suppress(ConfigError):  # an invalid value does not permit dumps
        if environment().core_dumps:
            return
    with contextlib.suppress(ValueError, OSError):
        _, most = resource.getrlimit(resource.RLIMIT_CORE)
        resource.setrlimit(resource.RLIMIT_CORE, (1 if most == resource.RLIM_INFINITY or most >= 1 else 0, most))
    if whole:
        with contextlib.suppress(OSError, AttributeError):
            ctypes.CDLL(None).prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)
