"""Low priority for a process or thread of ours: training comes first for processor and disk."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from relight.comm.new_threads import ThreadPool

T = TypeVar("T")
LAST = 19
_TRIES, _AGAIN_S = 60, 0.05
"""The kernel takes ten changes a second, of all processes together."""


def lower_priority(nice: int) -> None:
    """Be the last to run, of processor and disk, as ``nice`` (0 to 19) says; where that is not allowed, go on as before.

    Linux shares the processor out between sessions first, where the kernel groups them by themselves (``sched_autogroup_enabled``, as most
    distributions have it), and heeds ``nice`` within a session only: a process that has a session of its own would take as much as the
    training. So the session's group is made to wait, too (sched(7), "The autogroup feature"). It is this process's own if it leads it.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    _lower_group(nice)


def _lower_group(nice: int) -> None:
    """What the session's group is to wait, if it is this process's own. There is a way back from that, ten times a second at most."""
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
    """What ``work`` gives, or raises, done in what processor time others leave, in a thread of its own and those that it
    starts. This one waits, and the process has ``nice`` again behind it. Where all cores are busy that takes many times as long: it is for
    what nobody waits for."""
    with ThreadPool(1, "relight-behind", initializer=lower_after, initargs=(LAST,)) as pool:
        _lower_group(LAST)
        try:
            return pool.submit(work).result()
        finally:
            _lower_group(nice)


def lower_after(by: int) -> None:
    """Have this thread, and those that it starts, wait for others of this process too. For good: the way back takes a privilege."""
    with contextlib.suppress(OSError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + by))
