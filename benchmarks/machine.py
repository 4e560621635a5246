"""The measured machine and the versions of its software, without anything that identifies it."""

from __future__ import annotations

import os
import platform
import resource
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path


def describe(folder: Path) -> dict[str, str | int]:
    """Processor, cores, memory, kernel, file system of ``folder``, versions."""
    cpu = _line("/proc/cpuinfo", "model name").partition(":")[2].strip()
    memory_gib = int(_line("/proc/meminfo", "MemTotal").split()[1]) / (1 << 20)
    return {
        "cpu": cpu or platform.machine(),
        "cores": os.cpu_count() or 1,
        "memory_gib": round(memory_gib),
        "kernel": platform.release().split("-")[0],
        "file_system": _file_system(folder),
        "python": platform.python_version(),
        **{name: _version(name) for name in ("torch", "numpy", "blake3", "relight")},
    }


def available_bytes() -> int:
    """Memory that could be used now."""
    return int(_line("/proc/meminfo", "MemAvailable").split()[1]) << 10


def busy_s() -> float:
    """Processor seconds that this machine has spent so far on anything, the host's theft included."""
    user, nice, system, _, _, *rest = (int(field) for field in _line("/proc/stat", "cpu ").split()[1:9])
    return (user + nice + system + sum(rest)) / os.sysconf("SC_CLK_TCK")


def own_cpu_s() -> float:
    """Processor seconds of this process and its ended children so far."""
    own, ended = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime


def touch(size: int) -> None:
    """Write to that much memory and give it back: after idling, a virtual machine may have to get it from its host first."""
    import mmap

    with mmap.mmap(-1, size) as area:
        for offset in range(0, size, mmap.PAGESIZE):
            area[offset] = 1


def _line(path: str, key: str) -> str:
    return next((line for line in Path(path).read_text().splitlines() if line.startswith(key)), f"{key}: 0")


def _file_system(folder: Path) -> str:
    best = ("", "unknown")
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, *_ = line.split()
        if folder.resolve().is_relative_to(place) and len(place) >= len(best[0]):
            best = (place, kind)
    return best[1]


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "missing"
