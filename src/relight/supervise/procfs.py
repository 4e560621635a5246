"""Reads process states and CPU times from /proc."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")
_AGENT = "relight.agent.server"
"""Module of the agent, the process that writes saves, in its command line."""


class ProcessSample(NamedTuple):
    """One process at one time."""

    state: str = ""
    """``R``, ``S``, ``D``, ``T``, ``Z``…; empty: the process does not exist."""
    cpu_s: float = 0.0
    moved_bytes: int = 0
    """Bytes read and written by system calls, since it began."""


def sample_process(pid: int) -> ProcessSample:
    """Return a process's state, CPU time and I/O; an empty sample if it does not exist. Cost: two small reads."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return ProcessSample()
    moved = 0
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines():
            name, _, value = line.partition(":")
            if name in ("rchar", "wchar"):
                moved += int(value)
    return ProcessSample(fields[0], (int(fields[11]) + int(fields[12])) / _TICKS, moved)


def began_at(pid: int) -> float | None:
    """Return when a process was started, on the clock of ``time.monotonic()``; None if it does not exist."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[19]) / _TICKS
    return None


def command_of(pid: int) -> str:
    """Return a process's command line; empty if it does not exist."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def busy_s(pid: int) -> float:
    """Return the seconds in which a process's threads ran, or waited for a CPU. Cost: a small read for each thread."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text(encoding="ascii").split()
                total += int(ran) + int(waited)
    return total / 1e9


def has_handler(pid: int, signum: int) -> bool:
    """Return whether a process has a handler for a signal. Without a handler the signal might end it."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def where_in_kernel(pid: int) -> str:
    """Return the kernel function that a process's main thread waits in; empty if that may not be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("\0 \n0")
    return ""


def sample_agent(pid: int) -> ProcessSample:
    """Sample the agent with that process id. Return an empty sample if another process has the id now."""
    return sample_process(pid) if _AGENT in command_of(pid) else ProcessSample()


def oom_kills() -> int:
    """Return how many processes of this control group the kernel has killed for lack of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                kills = _count(Path(f"/sys/fs/cgroup{path}/memory.events"), "oom_kill")
            elif "memory" in controllers.split(","):
                kills = _count(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill")
            else:
                continue
            if kills is not None:
                return kills
    return 0


def _count(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            word, _, value = line.partition(" ")
            if word == name:
                return int(value)
    return None
