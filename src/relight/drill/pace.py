"""Bounds of a drill's waits: they follow what the job has taken on this machine, in this drill.

A constant is right on the machine on which it was chosen. Where the same job starts ten times as slowly, a job that comes back as it should
would be called failed.
"""

from __future__ import annotations

import math
import time

LEAST_S = 300.0
"""Seconds for one rehearsal, at least."""
STARTS, REHEARSALS = 20.0, 5.0
"""A rehearsal may take so many times the slowest start of the job, and so many times the slowest rehearsal that passed. One takes five to
six starts: two of its own, one of the undisturbed run, and steps."""


class Pace:
    """What a drill has measured of its job: shared by all of its rehearsals."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """``timeout_s``: the user's own bound, which then holds unchanged."""
        self._timeout_s = timeout_s
        self.start_s = self.rehearsal_s = 0.0

    def started(self, seconds: float) -> None:
        """Take note of a start: until all ranks made steps."""
        self.start_s = max(self.start_s, seconds)

    def passed(self, seconds: float) -> None:
        """Take note of a whole rehearsal that passed."""
        self.rehearsal_s = max(self.rehearsal_s, seconds)

    @property
    def measured(self) -> bool:
        """Whether there is a bound: without a first start there is nothing that it could follow."""
        return self._timeout_s is not None or self.start_s > 0 or self.rehearsal_s > 0

    @property
    def bound_s(self) -> float:
        """Seconds for one rehearsal; infinite while nothing is measured."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(LEAST_S, STARTS * self.start_s, REHEARSALS * self.rehearsal_s) if self.measured else math.inf


class Limit:
    """Until when one rehearsal may take: its own bound, and the end of the drill."""

    def __init__(self, pace: Pace, over_at: float = math.inf) -> None:
        """``over_at``: when the drill is over, on the monotonic clock."""
        self.pace, self._over_at, self._began = pace, over_at, time.monotonic()

    @property
    def ends(self) -> float:
        """When it is over, as far as is known now: a start that was slow moves it."""
        return min(self._began + self.pace.bound_s, self._over_at)

    @property
    def cut_short(self) -> bool:
        """Whether the drill ends before the rehearsal has had its time: then a wait that is over shows nothing."""
        return self.pace.measured and self._over_at < self._began + self.pace.bound_s
