"""Copying while training goes on, or at once: whichever training loses less by. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

_AT_ONCE_EVERY, _LATER_EVERY = 8, 32
"""How often the other way is tried, while it is not known to lose, and once it is."""
_CLEARLY = 0.8
"""Copying at once has to cost less than this share of the other way: it is the one that scales."""


class Overlap:
    """What both ways have cost lately, in seconds, in time that ``step()`` blocked and the step behind it took longer.

    Where training leaves memory bandwidth and a core to spare, a copy behind its back is free. Where it does not (two cores, both busy), it
    may cost more than waiting for it would: caches and schedulers suffer. Only trying tells.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=15)
        self._cost: dict[bool, deque[float]] = {True: deque(maxlen=5), False: deque(maxlen=5)}
        self._pending: tuple[bool, float] | None = None
        self._saves = 0

    def choose(self) -> bool:
        """Whether the next save is copied while training goes on."""
        self._saves += 1
        if len(self._cost[True]) < 3:
            return True
        if len(self._cost[False]) < 3:
            return self._saves % _AT_ONCE_EVERY != 0
        better = self.prefers
        return better if self._saves % _LATER_EVERY else not better

    @property
    def prefers(self) -> bool:
        """What has cost less, as far as is known."""
        if len(self._cost[False]) < 3:
            return True
        return median(self._cost[False]) > _CLEARLY * median(self._cost[True])

    def began(self, overlapped: bool, blocked_s: float) -> None:
        """A save was begun; the next interval shows what it costs beyond that."""
        self._pending = (overlapped, blocked_s)

    def interval(self, seconds: float, quiet: bool) -> None:
        """From one return of ``step()`` to the next call. ``quiet``: no save was under way in it."""
        if self._pending is not None:
            overlapped, blocked_s = self._pending
            self._pending = None
            if len(self._plain) >= 3:
                self._cost[overlapped].append(blocked_s + max(0.0, seconds - median(self._plain)))
        elif quiet:
            self._plain.append(seconds)
