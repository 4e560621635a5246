"""Process trees from ``/proc``: parents, descendants, and killing all descendants."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path


def parents() -> dict[int, int]:
    """Return the parent of every process."""
    result = {}
    for name in os.listdir("/proc"):
        if name.isdecimal():
            with contextlib.suppress(OSError, ValueError, IndexError):
                text = Path(f"/proc/{name}/stat").read_text(encoding="utf-8", errors="replace")
                result[int(name)] = int(text.rpartition(")")[2].split()[1])
    return result


def descendants(pid: int) -> list[int]:
    """Return all descendants of a process."""
    below: dict[int, list[int]] = {}
    for child, parent in parents().items():
        below.setdefault(parent, []).append(child)
    result, todo = [], [pid]
    while todo:
        for child in below.get(todo.pop(), []):
            result.append(child)
            todo.append(child)
    return result


def is_below(pid: int, ancestor: int) -> bool:
    """Return whether a process is ``ancestor`` or one of its descendants."""
    above = parents()
    while pid > 1:
        if pid == ancestor:
            return True
        pid = above.get(pid, 0)
    return False


def arguments_of(pid: int) -> list[str]:
    """Return the command line of a process; empty if the process has ended."""
    try:
        data = Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return []
    return [argument.decode(errors="replace") for argument in data.split(b"\0")[:-1]]


def kill_below(pid: int, within_s: float = 10.0) -> list[int]:
    """Send SIGKILL to all descendants repeatedly, until none is left. Return those that are still alive after ``within_s`` seconds."""
    ends = time.monotonic() + within_s
    while left := [child for child in descendants(pid) if arguments_of(child)]:
        for child in left:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(child, signal.SIGKILL)
        if time.monotonic() > ends:
            return left
        if pid == os.getpid():
            # orphans became children of this process: no other process reaps them
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
        time.sleep(0.01)
    return []
