"""What ended each life of a job, as the node knows it that failed; the others only lost it, or saw others come and go."""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from relight.supervise.goodput import Goodput
from relight.supervise.incidents import Incident, IncidentLog, cause_of, is_told

CLOCKS_S = 3600.0
"""How far nodes' clocks may be apart."""
UNSURE_S = 600.0
"""So long after a life somebody may write down what ended it: a store may not answer for a while."""


class _Incarnation(NamedTuple):
    """One that is over. ``number``: what ``Goodput`` calls its end. Times in seconds since 1970; ``until``: when the next began."""

    number: int
    meeting: str
    began: float
    until: float = math.inf

    def has(self, one: Incident) -> bool:
        """Whether it was written down of this life. Only nodes that have not agreed on its name go by their clocks."""
        return one.meeting == self.meeting if self.meeting else self.began <= one.time_s <= self.until


class Endings:
    """Of one job, as ``group`` is called where its nodes meet: empty if there is but one."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._meeting = ""
        self._last: _Incarnation | None = None
        """The last one, as long as there is no other."""
        self._unsure: list[_Incarnation] = []
        """Those before of which it is not known."""

    def begun(self, meeting: str = "") -> None:
        """The next life has: what ended the one before is written down by whoever knows. ``meeting``: what all nodes call it, or empty."""
        self._meeting = meeting
        if self._last is not None:
            self._unsure.append(self._last._replace(until=time.time()))
            self._last = None

    def ended(self, number: int, lasted_s: float) -> None:
        """A life of so many seconds has; ``number``: what ``Goodput`` calls its end."""
        self._last = _Incarnation(number, self._meeting, time.time() - lasted_s) if self._group else None

    def learn(self, goodput: Goodput, book: IncidentLog) -> None:
        """Tell ``goodput`` what is known by now. Any thread, one at a time. Cost: what has been written since the first life that is not
        known of is read."""
        last = self._last
        unsure = [*self._unsure, *([last] if last is not None else [])]
        written = book.since(min(life.began - (CLOCKS_S if life.meeting else 0.0) for life in unsure)) if unsure else []
        if written is None:
            return  # asked again the next time
        for life in unsure:
            there = [one for one in written if one.group == self._group and life.has(one)]
            if there:
                goodput.set_kind(life.number, cause_of(there))
            if life in self._unsure and (any(is_told(one.kind) for one in there) or time.time() - life.until > UNSURE_S):
                self._unsure.remove(life)
