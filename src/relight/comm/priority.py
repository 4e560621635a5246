"""Low priority for Relight's processes and threads: training comes first for processor and disk."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from relight.comm.new_threads import ThreadPool

T = TypeVar("T")
LAST = 19
_TRIES, _AGAIN_S = 60, 0.05
"""The kernel accepts ten changes a second from all processes together."""


def lower_priority(nice: int) -> None:
    """Lower this process's priority for processor and disk to ``nice`` (0 to 19). Without permission, do nothing.

    If the kernel groups sessions (``sched_autogroup_enabled``, the default of most distributions), Linux first shares
    the processor between sessions, and ``nice`` counts only within a session. A process with a session of its own
    would then get as much time as the training. So the session's group gets the priority, too, if this process leads
    the session (sched(7), "The autogroup feature").
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    _lower_group(nice)


def _lower_group(nice: int) -> None:
    """Set the priority of the session's group if this process leads the session. It can be raised again; ten changes a
    second at most."""
    for _ in range(_TRIES if os.getsid(0) == os.getpid() else 0):
        try:
            with open("/proc/self/autogroup", "r+", encoding="ascii") as file:
                if file.read().split()[-1:] == [str(nice)]:
                    return
                file.write(str(nice))
            return
        except OSError as error:
            if error.errno != errno.EAGAIN:
                return
            time.sleep(_AGAIN_S)


def idle_priority(work: Callable[[], T], nice: int) -> T:
    """Return what ``work`` returns, or raise its error. It runs in another thread that uses only idle processor time.

    Any other process that becomes ready to run interrupts it at once (SCHED_IDLE). A thread that only has the lowest
    ``nice`` may finish its slice of some milliseconds first, and all threads of a training wait for the one that it
    delays. The caller waits, and the process has ``nice`` again afterwards. If all cores are busy, the work takes many times
    as long: use it only for work that no caller waits for.
    """
    with ThreadPool(1, "relight-idle", initializer=_use_idle_time) as pool:
        _lower_group(LAST)
        try:
            return pool.submit(work).result()
        finally:
            _lower_group(nice)


def _use_idle_time() -> None:
    """Use only idle processor time in this thread, and in threads that it starts. Permanent."""
    lower_after(LAST)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))


def lower_after(by: int) -> None:
    """Lower the priority of this thread, and of threads that it starts, by ``by``. Permanent: raising it takes a
    privilege."""
    with contextlib.suppress(OSError):
        thread = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + by))
