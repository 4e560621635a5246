"""What ended each life of a job, as the node knows it that failed; the others only lost it, or saw others come and go."""

from __future__ import annotations

import math
import time

from relight.supervise.goodput import Goodput
from relight.supervise.incidents import Book, cause_of, is_told

UNSURE_S = 600.0
"""So long after a life somebody may write down what ended it: a store may not answer for a while."""


class Endings:
    """Of one job, as ``group`` is called where its nodes meet: empty if there is but one."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._last: tuple[int, float] | None = None
        """Of the last life, as long as there is no other: what ``Goodput`` calls its end, and when it began, in seconds since 1970."""
        self._unsure: list[tuple[int, float, float]] = []
        """The same of those before, and when the next began."""

    def begun(self) -> None:
        """The next life has: what ended the one before is written down by whoever knows."""
        if self._last is not None:
            self._unsure.append((*self._last, time.time()))
            self._last = None

    def ended(self, number: int, lasted_s: float) -> None:
        """A life of so many seconds has; ``number``: what ``Goodput`` calls its end."""
        self._last = (number, time.time() - lasted_s) if self._group else None

    def learn(self, goodput: Goodput, book: Book) -> None:
        """Tell ``goodput`` what is known by now. Any thread, one at a time. Cost: what has been written since the first life that is not
        known of is read."""
        last = self._last
        unsure = [*self._unsure, *([(*last, math.inf)] if last is not None else [])]
        written = book.since(min(began for _, began, _ in unsure)) if unsure else []
        if written is None:
            return  # asked again the next time
        for life in unsure:
            number, began, until = life
            there = [one for one in written if one.group == self._group and began <= one.time_s <= until]
            if there:
                goodput.told(number, cause_of(there))
            if life in self._unsure and (any(is_told(one.kind) for one in there) or time.time() - until > UNSURE_S):
                self._unsure.remove(life)
