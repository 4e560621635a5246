"""Supervises one job across its incarnations: observes its processes, decides about failures, records both."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from relight.heartbeat import Heartbeat, RiskWarning
from relight.observe import write_events
from relight.policy.rollback_env import SPIKES
from relight.prediction import HORIZON_S, Alarm
from relight.save_reason import preventive
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise import shared_pages
from relight.supervise.accounting import JobAccount
from relight.supervise.end_request import EndRequest
from relight.supervise.facts import Decision, Departure, Worker
from relight.supervise.goodput import FIRST
from relight.supervise.incarnation import Incarnation, JobDetectors
from relight.supervise.incidents import IncidentLog
from relight.supervise.notices import Notices
from relight.supervise.recovery import Recovery
from relight.supervise.save_requests import SaveRequests
from relight.supervise.shared_pages import SharedPages


class Supervisor:
    """Supervises the ranks of one node, by its parts.

    The main thread owns all attributes but ``drains``, and calls all methods. The prediction thread owns ``drains``, and
    calls ``foresee`` and ``seen``. Other threads read ``incarnation``, which ``begin`` replaces.
    """

    def __init__(
        self,
        settings: SuperviseSettings,
        job: str,
        fallback: Path,
        clock: Callable[[], float] = time.monotonic,
        notices: Notices | None = None,
        group: str = "",
    ) -> None:
        """``fallback``: directory of incidents without the run's store. ``group``: the rendezvous' address and id."""
        log = IncidentLog(fallback)
        self.pages = SharedPages(shared_pages.memory())
        self._new_incarnation = partial(Incarnation, self.pages, JobDetectors.starting(settings), clock)
        self.incarnation = self._new_incarnation()
        """The present incarnation of the ranks; before the first start, one with the number 0."""
        self.saves = SaveRequests(self.pages, lambda: self.incarnation.pids, clock)
        self.account = JobAccount(job, log, group, clock)
        self.recovery = Recovery(settings, job, log, group, clock)
        self.end = EndRequest(clock)
        """The signal that asked the job to end, and the time that is left."""
        self.drains = ""
        """Why this machine leaves the job although it works; empty if it does not leave."""
        self._notices, self._clock = notices or Notices(()), clock

    def close(self) -> None:
        """Write the last account, stop the threads, and remove the directory in memory, in the time that is left."""
        self.account.close(self.end.left_s)
        self._notices.close()
        self.saves.close(self.end.left_s)
        self.pages.close()

    def begin(self, ranks: list[int], settings: Mapping[str, str], meeting: str = "") -> dict[int, dict[str, str]]:
        """Begin an incarnation of the job with these ranks on this node. Return the environment variables of each rank.

        ``settings``: variables for all ranks. ``meeting``: the name that all nodes give this incarnation, or empty.
        """
        self.incarnation = self._new_incarnation(self.incarnation.number + 1, meeting)
        self.account.begun(meeting)
        return self.pages.begin(ranks, {SPIKES: f"{self.recovery.rules.spikes:g}", **settings})

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process ids of the ranks that were started, by rank."""
        self.account.started(after_failure=self.recovery.has_failed)
        self.incarnation.started(pids)
        self.recovery.started(pids)

    def poll(self) -> str:
        """Check all ranks. Return why the job hangs; empty if it does not. Call it some times a second.

        It takes up to a second longer if a rank is late, because it takes stacks.
        """
        if not self.incarnation.pids:
            return ""
        observations = self.incarnation.observe()
        self._learn_run()
        self.recovery.follow_up(self.incarnation)
        self.account.update({rank: seen for rank, seen in observations.items() if seen.exists})
        self.saves.poll()
        return self.incarnation.check(observations)

    def publish_loss(self) -> None:
        """Publish to the other ranks that one has failed."""
        self.account.update(self.incarnation.observe())  # the time from now on does not count as training
        self.pages.publish_loss()

    def failed(
        self,
        workers: Sequence[Worker],
        *,
        hung: str = "",
        asked_to_end: str = "",
        noticed: float | None = None,
        departure: Departure | None = None,
    ) -> Decision:
        """Record that the incarnation has failed, and return the decision. ``workers``: exits and errors."""
        now = self._clock()
        evidence = self.recovery.evidence(
            self.incarnation, workers, hung=hung, asked_to_end=asked_to_end, departure=departure
        )
        failure = self.recovery.failure_of(self.incarnation, evidence)
        self._learn_run()
        if not self.incarnation.is_over:  # otherwise the job was asked to end between two incarnations
            self.account.update(self.incarnation.observe())
            self.recovery.follow_up(self.incarnation)  # it may have completed a step and failed between two polls
            self._end_incarnation(now, failure.kind)
        return self.recovery.decide(self.incarnation, evidence, failure, now, noticed=noticed, drains=bool(self.drains))

    def ended(self, signal_name: str) -> Decision:
        """Record that the job was asked to end, and has ended."""
        workers = [Worker(rank) for rank in sorted(self.incarnation.pids)]
        return self.failed(workers, asked_to_end=self.announced or f"{signal_name} came")

    def end_without_failure(self, action: str, why: str) -> None:
        """Record that this node ends without a failure of its ranks. See ``Recovery.end_without_failure``."""
        self.recovery.end_without_failure(self.incarnation, action, why)

    def end_for_membership_change(self) -> None:
        """End the incarnation because nodes join or leave. A node that failed records its failure itself."""
        self.account.update(self.incarnation.observe())
        self._end_incarnation(self._clock(), FIRST)

    def foresee(self, alarm: Alarm, drain: bool) -> bool:
        """Act on the prediction of a failure. Any thread. ``drain``: whether this machine may leave the job for it.

        Return whether the machine leaves the job. No other action here averts the failure.
        """
        self.saves.request(reason=preventive(alarm.why))
        self.pages.warn(RiskWarning(self._clock(), alarm.likely, HORIZON_S, alarm.why))
        if alarm.action == "save more often":
            self.saves.save_often()
        elif alarm.action == "drain node" and drain:
            self.drains = f"{alarm.why}; {alarm.reason}"
            return True
        return False

    def seen(self) -> dict[int, tuple[int, Heartbeat]]:
        """Return the process id and the last heartbeat of each present rank. Any thread."""
        return self.incarnation.seen()

    @property
    def announced(self) -> str:
        """The signal, notice or alarm that asked this node's part of the job to end; empty if there was none."""
        return self.end.signal or self._notices.announcement or self.drains

    def _learn_run(self) -> None:
        """Once a rank has published the run's store, read and write there."""
        if self.recovery.knows_run:
            return
        beat = next((beat for beat in self.incarnation.beats().values() if beat.url), None)
        if beat is None:
            return
        write_events(beat.url, beat.run, role="supervisor")
        self.account.begin_writing()
        store = self.recovery.learn_run(beat.url, beat.run)
        if store is not None:
            self.saves.follow_log(store, beat.run)

    def _end_incarnation(self, now: float, kind: str) -> None:
        if self.incarnation.has_restored:
            self.recovery.rollback_applied()
        self.account.ended(now, now - self.incarnation.began, kind)
        self.incarnation.is_over = True
