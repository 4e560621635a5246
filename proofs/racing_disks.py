"""Disks on which another process acts or dies at a chosen call.

Both wrap another disk, and keep what that process left.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import ParamSpec, TypeVar

from relight.store import Disk
from relight.testing.disks import CHANGING, DiskCall, HookedDisk, SimulatedDisk

P = ParamSpec("P")
R = TypeVar("R")


class AfterLinks(HookedDisk):
    """Keeps a copy of the disk after each ``link``, and ``cuts`` disks with a power cut after every changing call."""

    def __init__(self, inner: SimulatedDisk, *, cuts: int = 0) -> None:
        super().__init__(inner)
        self.simulated, self.cuts = inner, cuts
        self.linked: list[SimulatedDisk] = []
        self.cut: list[SimulatedDisk] = []

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Do the call, then copy."""
        result = go(*args, **kwargs)
        if call.name == "link":
            self.linked.append(self.simulated.clone())
        if call.name in CHANGING:
            self.cut += [self.simulated.power_cut(seed, "mixed") for seed in range(self.cuts)]
        return result


class MadeByTheDead(HookedDisk):
    """Just before the ``nth`` call ``name`` of ``path``, another process makes that directory and dies before the parent's fsync."""

    def __init__(self, inner: Disk, name: str, path: str, nth: int) -> None:
        super().__init__(inner)
        self.wanted, self.nth, self.seen = (name, path), nth, 0

    def around(self, call: DiskCall, go: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Make the directory first, if it is this call."""
        if call[:2] == self.wanted:
            self.seen += 1
            if self.seen == self.nth:
                with contextlib.suppress(FileExistsError, FileNotFoundError):
                    self.inner.mkdir(call.path)
        return go(*args, **kwargs)
