"""Accounts for the job's time on this node, and writes the account once a minute.

Other nodes' incidents name what ended each incarnation: only the node that failed knows the cause, and the other nodes
only lost its ranks.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from typing import NamedTuple

from relight.comm import new_threads
from relight.heartbeat import HANDING_OVER, Heartbeat
from relight.log.identity import now_text
from relight.supervise.goodput import FIRST, TRAINING, Account, Goodput
from relight.supervise.incidents import CLOCKS_S, Incident, IncidentLog, cause_of, is_cause
from relight.supervise.limits import RankObservation

ACCOUNT_S = 60.0
"""Seconds between two writes of the job's account."""
CLOSING_S = 20.0
"""Seconds that writing the last account may take. A machine that is wanted back must not wait for a store."""
CAUSE_PENDING_S = 600.0
"""Seconds after an incarnation in which another node may still record the cause of its end.

That node's store may not answer for a while.
"""


class JobAccount:
    """The account of one job's time.

    The main thread calls all methods and owns all attributes. The writing thread calls ``write``, and only it learns
    causes while it runs, so a slow store delays no poll.
    """

    def __init__(
        self, job: str, log: IncidentLog, group: str = "", clock: Callable[[], float] = time.monotonic
    ) -> None:
        """``group``: the rendezvous' address and id; empty for one node."""
        self._job, self._log, self._clock = job, log, clock
        self._goodput, self._began_at = Goodput(clock()), now_text()
        self._endings = Endings(group)
        self._is_written = False
        """Whether the account is written: not before the run is known."""
        self._written_at = clock()
        self._writer: threading.Thread | None = None

    def begun(self, meeting: str = "") -> None:
        """Record that an incarnation has begun. ``meeting``: the name that all nodes give it, or empty."""
        self._endings.begun(meeting)

    def started(self, *, after_failure: bool) -> None:
        """Charge the time until now to the start of the job, or to the failure before."""
        self._goodput.update(self._clock(), "down" if after_failure else "starting")

    def update(self, observations: Mapping[int, RankObservation]) -> None:
        """Charge the time since the last call to the ranks' phase. Write the account every ``ACCOUNT_S``."""
        beats = [rank.beat or Heartbeat(phase="starting") for rank in observations.values()]
        if not beats:
            return
        now = self._clock()
        elsewhere = [beat.phase for beat in beats if beat.phase not in (TRAINING, HANDING_OVER)]
        last = min(beats, key=lambda beat: beat.steps)
        self._goodput.update(now, elsewhere[0] if elsewhere else TRAINING, last.step, last.steps)
        is_writing = self._writer is not None and self._writer.is_alive()
        if self._is_written and now - self._written_at >= ACCOUNT_S and not is_writing:
            self._written_at = now
            writer = threading.Thread(target=self._write, args=(self.present(),), name="relight-account", daemon=True)
            # a thread that the system refused could not be joined at the end
            self._writer = writer if new_threads.start(writer) else None

    def ended(self, now: float, lasted_s: float, kind: str = FIRST) -> None:
        """Record that an incarnation has ended after ``lasted_s``. ``kind``: ``FIRST`` if nodes join or leave."""
        self._endings.ended(self._goodput.failed(now, kind), lasted_s)

    def begin_writing(self) -> None:
        """Write the account from now on: the run is known."""
        self._is_written = True

    def learn_causes(self) -> None:
        """Read from other nodes' incidents what ended each incarnation with an unknown cause."""
        self._endings.learn(self._goodput, self._log)

    def write(self) -> None:
        """Learn causes, then write the account now."""
        self.learn_causes()
        self._log.keep(self.present())

    def present(self) -> Account:
        """Return the account up to the last ``update``."""
        return self._goodput.account(self._job, self._began_at)

    @property
    def causes(self) -> list[str]:
        """The kind of failure that ended each incarnation; ``FIRST`` where nodes joined or left."""
        return self._goodput.causes[1:]

    @property
    def reached(self) -> int:
        """The furthest step that all ranks have completed, in any incarnation."""
        return self._goodput.reached

    def close(self, within_s: float = math.inf) -> None:
        """Write the last account, within ``CLOSING_S`` and ``within_s``."""
        if not self._is_written:
            return
        last = threading.Thread(target=self._write_last, args=(self._writer,), name="relight-account", daemon=True)
        if new_threads.start(last):
            last.join(min(CLOSING_S, within_s))

    def _write(self, account: Account) -> None:
        self._log.keep(account)
        self.learn_causes()

    def _write_last(self, before: threading.Thread | None) -> None:
        """Write the last account, after the thread ``before`` has written its own."""
        if before is not None:
            before.join()
        self.write()


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
