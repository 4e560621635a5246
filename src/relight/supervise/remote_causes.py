"""Learns from other nodes' incidents what ended each incarnation.

Only the node that failed knows the cause. The other nodes only lost its ranks.
"""

from __future__ import annotations

import math
import time
from typing import NamedTuple

from relight.supervise.goodput import Goodput
from relight.supervise.incidents import Incident, IncidentLog, cause_of, is_cause

CLOCKS_S = 3600.0
"""Seconds by which nodes' clocks may differ."""
CAUSE_PENDING_S = 600.0
"""Seconds after an incarnation in which another node may still record the cause of its end.

That node's store may not answer for a while.
"""


class _Incarnation(NamedTuple):
    """An incarnation that has ended.

    ``number``: that of ``Goodput.failed``. Times in seconds since 1970; ``until``: when the next began.
    """

    number: int
    meeting: str
    began: float
    until: float = math.inf

    def has(self, incident: Incident) -> bool:
        """Return whether an incident is of this incarnation.

        Clocks decide only if the nodes have not agreed on a name.
        """
        return incident.meeting == self.meeting if self.meeting else self.began <= incident.time_s <= self.until


class Endings:
    """The ends of one job's incarnations. ``group``: the rendezvous' address and id; empty for one node."""

    def __init__(self, group: str) -> None:
        self._group = group
        self._meeting = ""
        self._last: _Incarnation | None = None
        """The last incarnation that ended, until the next one begins."""
        self._cause_pending: list[_Incarnation] = []
        """Earlier incarnations with an unknown cause."""

    def begun(self, meeting: str = "") -> None:
        """Record that the next incarnation has begun. ``meeting``: the name that all nodes give it, or empty."""
        self._meeting = meeting
        if self._last is not None:
            self._cause_pending.append(self._last._replace(until=time.time()))
            self._last = None

    def ended(self, number: int, lasted_s: float) -> None:
        """Record that an incarnation has ended after ``lasted_s``. ``number``: that of ``Goodput.failed``."""
        self._last = _Incarnation(number, self._meeting, time.time() - lasted_s) if self._group else None

    def learn(self, goodput: Goodput, book: IncidentLog) -> None:
        """Set in ``goodput`` the causes that are known by now. Any thread, one at a time.

        Cost: reads the incidents since the first incarnation with an unknown cause.
        """
        last = self._last
        incarnations = [*self._cause_pending, *([last] if last is not None else [])]
        incidents = (
            book.since(min(life.began - (CLOCKS_S if life.meeting else 0.0) for life in incarnations))
            if incarnations
            else []
        )
        if incidents is None:
            return  # the store does not answer: read again the next time
        for life in incarnations:
            own_incidents = [incident for incident in incidents if incident.group == self._group and life.has(incident)]
            if own_incidents:
                goodput.set_kind(life.number, cause_of(own_incidents))
            if life in self._cause_pending and (
                any(is_cause(incident.kind) for incident in own_incidents) or time.time() - life.until > CAUSE_PENDING_S
            ):
                self._cause_pending.remove(life)
