"""Choose between copying while training continues and copying at once, by which costs training less. Pure."""

from __future__ import annotations

from collections import deque
from statistics import median

_AT_ONCE_EVERY, _LATER_EVERY = 8, 32
"""Saves between two trials of the other method: while its cost is unknown, and once it is known to be worse."""
_CLEARLY = 0.8
"""Copying at once is preferred only if it costs less than this share of overlapping, because overlapping scales
better."""


class Overlap:
    """Recent costs of both methods in seconds: the time that ``step()`` blocked, plus the slowdown of the next step.

    If training leaves memory bandwidth and a core unused, a copy in the background is free. If it does not (two cores,
    both busy), the copy may cost more than waiting for it, because caches and the scheduler suffer. So both methods are
    measured.
    """

    def __init__(self) -> None:
        self._plain: deque[float] = deque(maxlen=15)
        self._cost: dict[bool, deque[float]] = {True: deque(maxlen=5), False: deque(maxlen=5)}
        self._pending: tuple[bool, float] | None = None
        self._saves = 0

    def choose(self) -> bool:
        """Return whether to copy the next save while training continues."""
        self._saves += 1
        if len(self._cost[True]) < 3:
            return True
        if len(self._cost[False]) < 3:
            return self._saves % _AT_ONCE_EVERY != 0
        better = self.prefers
        return better if self._saves % _LATER_EVERY else not better

    @property
    def prefers(self) -> bool:
        """Return whether overlapping has cost less, as far as is known."""
        if len(self._cost[False]) < 3:
            return True
        return median(self._cost[False]) > _CLEARLY * median(self._cost[True])

    def began(self, overlapped: bool, blocked_s: float) -> None:
        """Record a started save; the next interval gives its further cost."""
        self._pending = (overlapped, blocked_s)

    def interval(self, seconds: float, quiet: bool) -> None:
        """Record the seconds from one return of ``step()`` to the next call. ``quiet``: no save was in progress."""
        if self._pending is not None:
            overlapped, blocked_s = self._pending
            self._pending = None
            if len(self._plain) >= 3:
                self._cost[overlapped].append(blocked_s + max(0.0, seconds - median(self._plain)))
        elif quiet:
            self._plain.append(seconds)
