"""Measure how busy the store's disk and the accelerator are while no save is written."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from relight.capture.accelerator import module_in_use

SAMPLE_S = 5.0
"""Seconds between two samples. A sample reads a file of one line, and queries the driver."""


class ResourceUse:
    """Samples the share of the time in which each resource was in use. Samples during a save do not count: the save itself is the use."""

    def __init__(self, root: str, clock: Callable[[], float]) -> None:
        """``root``: the store's directory. For a remote store, no disk is known."""
        self._file, self._clock = _stat_file(root), clock
        self._last: tuple[float, float] | None = None
        self._next_s = 0.0
        self.shares: dict[str, float] = {}
        """Share of the time in which each resource was busy. A resource that cannot be measured is missing."""

    def sample(self, writing: bool) -> bool:
        """Take a sample if one is due.

        Return whether ``shares`` may have changed. ``writing``: a save is being written.
        """
        now = self._clock()
        if writing:
            self._last = None
            return False
        if now < self._next_s:
            return False
        self._next_s = now + SAMPLE_S
        busy_s, last = _busy_s(self._file), self._last
        self._last = None if busy_s is None else (now, busy_s)
        if busy_s is not None and last is not None and now > last[0]:
            self.shares["disk"] = min(1.0, max(0.0, (busy_s - last[1]) / (now - last[0])))
        device = device_share()
        if device is not None:
            self.shares["device"] = device
        return True


def _stat_file(root: str) -> Path | None:
    """Return the path of the kernel's counters for the disk that has ``root``; None if it is not on a disk."""
    try:
        number = os.stat(root).st_dev
    except (OSError, ValueError):
        return None
    path = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/stat")
    return path if path.exists() else None


def _busy_s(path: Path | None) -> float | None:
    """Return the seconds in which the disk was busy since the system started."""
    if path is None:
        return None
    with contextlib.suppress(OSError, ValueError, IndexError):
        return int(path.read_text().split()[9]) / 1000
    return None


def device_share() -> float | None:
    """Return the recent share of time in which the current accelerator ran kernels.

    None if its torch module does not know it: CUDA needs the driver's library (pynvml), ROCm needs amdsmi.
    """
    module = module_in_use()
    if module is None or not hasattr(module, "utilization"):
        return None
    refusals: list[type[Exception]] = [ImportError, RuntimeError, OSError]
    with contextlib.suppress(ImportError):
        refusals.append(import_module("pynvml").NVMLError)
    with contextlib.suppress(*refusals):
        return float(module.utilization()) / 100
    return None
