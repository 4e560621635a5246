"""Bounds of a drill's waits, derived from the job's own times on this machine, in this drill.

A constant fits only the machine on which it was chosen. On a machine where the job starts ten times as slowly, a job that recovers
correctly would be reported as failed.
"""

from __future__ import annotations

import math
import time

LEAST_S = 300.0
"""Least bound of one rehearsal, in seconds."""
STARTS, REHEARSALS = 20.0, 5.0
"""Bound of a rehearsal, in slowest starts of the job, and in slowest rehearsals that passed. A rehearsal takes as long as five to six
starts: two of its own, one of the undisturbed run, and steps."""


class Pace:
    """Times of the job that a drill has measured. All of its rehearsals share them."""

    def __init__(self, timeout_s: float | None = None) -> None:
        """``timeout_s``: the user's own bound in seconds, which replaces the derived one."""
        self._timeout_s = timeout_s
        self.start_s = self.rehearsal_s = 0.0

    def started(self, seconds: float) -> None:
        """Record the seconds of a start, until all ranks made steps."""
        self.start_s = max(self.start_s, seconds)

    def passed(self, seconds: float) -> None:
        """Record the seconds of a rehearsal that passed."""
        self.rehearsal_s = max(self.rehearsal_s, seconds)

    @property
    def measured(self) -> bool:
        """Whether there is a bound. Before the first start, there is no time to derive it from."""
        return self._timeout_s is not None or self.start_s > 0 or self.rehearsal_s > 0

    @property
    def bound_s(self) -> float:
        """Seconds for one rehearsal; infinite while nothing is measured."""
        if self._timeout_s is not None:
            return self._timeout_s
        return max(LEAST_S, STARTS * self.start_s, REHEARSALS * self.rehearsal_s) if self.measured else math.inf


class Limit:
    """Deadline of one rehearsal: its own bound, and the end of the drill."""

    def __init__(self, pace: Pace, over_at: float = math.inf) -> None:
        """``over_at``: end of the drill, on the monotonic clock."""
        self.pace, self._over_at, self._began = pace, over_at, time.monotonic()

    @property
    def ends(self) -> float:
        """The deadline as known now, on the monotonic clock. A slow start moves it."""
        return min(self._began + self.pace.bound_s, self._over_at)

    @property
    def cut_short(self) -> bool:
        """Whether the drill ends before the rehearsal's own bound. A timeout then shows nothing about the job."""
        return self.pace.measured and self._over_at < self._began + self.pace.bound_s
