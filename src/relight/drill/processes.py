"""Who started whom, as the kernel tells it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def parents() -> dict[int, int]:
    """Every process's parent."""
    found = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
                found[int(name)] = int(text.rpartition(")")[2].split()[1])
    return found


def descendants(pid: int) -> list[int]:
    """What it started, and what that started, and so on."""
    below: dict[int, list[int]] = {}
    for child, parent in parents().items():
        below.setdefault(parent, []).append(child)
    found, todo = [], [pid]
    while todo:
        for child in below.get(todo.pop(), []):
            found.append(child)
            todo.append(child)
    return found


def is_below(pid: int, ancestor: int) -> bool:
    """Whether ``ancestor`` started it, or what started it, and so on."""
    above = parents()
    while pid > 1:
        if pid == ancestor:
            return True
        pid = above.get(pid, 0)
    return False


def arguments_of(pid: int) -> list[str]:
    """Its command line; empty if it is gone, or ends."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [one.decode(errors="replace") for one in data.split(b"\0")[:-1]]


def kill_below(pid: int, within_s: float = 10.0) -> list[int]:
    """SIGKILL to all that is below it, again and again, until nothing is left but what the kernel does not let go."""
    ends = time.monotonic() + within_s
    while left := [one for one in descendants(pid) if arguments_of(one)]:
        for one in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(one, signal.SIGKILL)
        if time.monotonic() > ends:
            return left
        if pid == os.getpid():
            with contextlib.suppress(ChildProcessError):  # orphans that have come to it: nobody else takes note of their end
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.01)
    return []
