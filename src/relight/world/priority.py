"""Being the last to run."""

from __future__ import annotations

import contextlib
import os
import threading


def lower_priority(nice: int) -> None:
    """Be the last to run, of processor and disk, as ``nice`` (0 to 19) says; where that is not allowed, go on as before.

    Linux shares the processor out between sessions first, where the kernel groups them by themselves (``sched_autogroup_enabled``, as most
    distributions have it), and heeds ``nice`` within a session only: a process that has a session of its own would take as much as the
    training. So the session's group is made to wait, too (sched(7), "The autogroup feature"). It is this process's own if it leads it.
    """
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, 0, nice)
    if os.getsid(0) == os.getpid():
        with contextlib.suppress(OSError), open("/proc/self/autogroup", "w", encoding="ascii") as file:
            file.write(str(nice))


def step_back(by: int) -> None:
    """Have this thread, and those that it starts, wait for others of this process too. For good: the way back takes a privilege."""
    with contextlib.suppress(OSError):
        me = threading.get_native_id()
        os.setpriority(os.PRIO_PROCESS, me, min(19, os.getpriority(os.PRIO_PROCESS, me) + by))
