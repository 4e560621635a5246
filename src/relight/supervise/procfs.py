"""Processes as the kernel sees them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import NamedTuple

_TICKS = os.sysconf("SC_CLK_TCK")


class ProcessSample(NamedTuple):
    """One, at a moment."""

    state: str = ""
    """``R``, ``S``, ``D``, ``T``, ``Z``…; empty: it is not there."""
    cpu_s: float = 0.0
    moved_bytes: int = 0
    """Read and written by calls, since it began."""


def sample_process(pid: int) -> ProcessSample:
    """Costs two small reads."""
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
    """Return when a process was started, on the clock of ``time.monotonic()``; None if it is not there."""
    with contextlib.suppress(OSError, ValueError, IndexError):
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return int(fields[19]) / _TICKS
    return None


def command_of(pid: int) -> str:
    """What it was started with; empty if it is not there."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
    return ""


def busy_s(pid: int) -> float:
    """Seconds in which its threads ran, or waited for a processor. A small read for each thread."""
    total = 0
    with contextlib.suppress(OSError):
        for task in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError, ValueError):
                ran, waited, _ = Path(f"/proc/{pid}/task/{task}/schedstat").read_text(encoding="ascii").split()
                total += int(ran) + int(waited)
    return total / 1e9


def catches(pid: int, signum: int) -> bool:
    """Whether a handler for that signal is installed there: without one it might end the process."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines():
            if line.startswith("SigCgt:"):
                return bool(int(line.split()[1], 16) >> (signum - 1) & 1)
    return False


def where_in_kernel(pid: int) -> str:
    """What its main thread waits for, where that may be read."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/wchan").read_text(encoding="ascii", errors="replace").strip("\0 \n0")
    return ""


def oom_kills() -> int:
    """How many processes of this one's control group the kernel has killed for want of memory."""
    with contextlib.suppress(OSError, ValueError):
        for line in Path("/proc/self/cgroup").read_text(encoding="utf-8").splitlines():
            number, controllers, path = line.split(":", 2)
            if number == "0":
                found = _count(Path(f"/sys/fs/cgroup{path}/memory.events"), "oom_kill")
            elif "memory" in controllers.split(","):
                found = _count(Path(f"/sys/fs/cgroup/memory{path}/memory.oom_control"), "oom_kill")
            else:
                continue
            if found is not None:
                return found
    return 0


def kernel_lines(since: float) -> list[str]:
    """What the kernel has said since then, on its monotonic clock, where that may be read."""
    found: list[str] = []
    with contextlib.suppress(OSError):
        descriptor = os.open("/dev/kmsg", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            while len(found) < 10_000:
                try:
                    line = os.read(descriptor, 8192).decode(errors="replace")
                except BrokenPipeError:  # what was there was overwritten meanwhile: it goes on with what is
                    continue
                head, _, text = line.partition(";")
                fields = head.split(",")
                if len(fields) > 2 and fields[2].isdecimal() and int(fields[2]) / 1e6 >= since:
                    found.append(text.splitlines()[0])
        except BlockingIOError:
            pass
        finally:
            os.close(descriptor)
    return found


def _count(path: Path, name: str) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in path.read_text(encoding="ascii").splitlines():
            word, _, value = line.partition(" ")
            if word == name:
                return int(value)
    return None
