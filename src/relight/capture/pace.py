"""How many batches the training loop has used of those that a loader delivered: a prefetcher between the two takes some ahead."""

from __future__ import annotations

from collections import Counter
from typing import Any

from relight.capture.delivered import caller, is_calling


class Pace:
    """Batches delivered and steps reported, of one pass over a loader.

    If the frame that asked the loader for its last batch is still running when a step is reported, the loop takes the batches itself: all
    are used. Else something stands between loader and loop. Then the batches per step are the usual number delivered between two reports;
    if more were delivered before the first report, the loader is ahead by the difference.
    """

    def __init__(self, earlier: Pace | None = None) -> None:
        """``earlier``: of the pass before this one, whose last batches may not be used yet."""
        self.rate = earlier.rate if earlier is not None else None
        """Batches per step; None: unknown."""
        self.owed = earlier.unreported if earlier is not None and earlier.rate else 0
        """Batches of the pass before that were not used at the last report."""
        self.ahead = 0
        self.unsure = False
        """Whether one report is all there is, and more than one batch was delivered before it."""
        self._direct = False
        self._taker: tuple[int, Any] | None = None
        self._taken = self._at_report = self._steps = self._first = self._first_steps = 0
        self._rates: Counter[int] = Counter()

    @property
    def unreported(self) -> int:
        """Batches of this pass that no reported step has used."""
        return 0 if self._direct else self._taken - self._at_report + self.ahead

    def take(self) -> None:
        """Note a delivered batch, and which code asked for it. Called by the iterator's ``__next__``. Half a microsecond."""
        taker = caller(2)
        if self._taker is not None and taker[1] is not self._taker[1] and not self._steps:
            self._taken = 0  # other code took those: an example for the model's shapes, and the like
        self._taker = taker
        self._taken += 1

    def report(self, steps: int) -> None:
        """Note that the loop reports ``steps`` further steps as done. Some microseconds."""
        if self._taker is None:
            return
        if self._direct or is_calling(self._taker, 1):
            self._direct, self.ahead, self.owed, self.unsure = True, 0, 0, False
            return
        if self.owed and self.rate:
            owed = min(self.owed, steps * self.rate)
            self.owed, steps = self.owed - owed, steps - owed // self.rate
        self._steps += steps
        since, self._at_report = self._taken - self._at_report, self._taken
        if not self._first:
            self._first, self._first_steps = self._taken, self._steps
        elif steps and since and since % steps == 0:
            self._rates[since // steps] += 1
        if self._rates:
            self.rate = self._rates.most_common(1)[0][0]
        elif self.rate is None and self._steps > 1:
            self.rate = self._taken // self._steps or None
        self.unsure = self.rate is None and self._steps == 1 and self._taken > 1
        excess = bool(self.rate) and self._first > (self.rate or 0) * self._first_steps
        self.ahead = max(0, self._taken - (self.rate or 0) * self._steps) if excess else 0
