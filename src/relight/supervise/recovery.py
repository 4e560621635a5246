"""Recovers from a failure: classifies it, decides, and records the incident and how training continued."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from relight.errors import RelightError
from relight.heartbeat import Heartbeat
from relight.heartbeat.heartbeat_page import NOT_YET
from relight.observe import emit
from relight.policy.rollback_env import once_back
from relight.settings.supervise_settings import SuperviseRules
from relight.store import ByteStore, open_bytes
from relight.store.urls import local_path
from relight.supervise import shared_pages
from relight.supervise.classify import classify
from relight.supervise.decide import FENCED, Past, decide
from relight.supervise.facts import Decision, Departure, Failure, FailureEvidence, Worker
from relight.supervise.incarnation import Incarnation
from relight.supervise.incidents import (
    CLOCKS_S,
    Incident,
    IncidentLog,
    RecoveryRecord,
    incident_of,
    once_each,
    read_incidents,
)
from relight.supervise.kernel_log import kernel_lines, lines_about
from relight.supervise.procfs import oom_kills
from relight.units import count_text, duration_text

ELSEWHERE_EVERY_S = 5.0
"""Seconds between two checks, on a node without the rendezvous, whether another node has stopped the job."""
INCIDENT_COUNTS_S = 86400.0
"""Seconds after which an earlier incident of a run no longer counts for this job."""
_PAST_MAX = 50
_FULL_BYTES = 1 << 20


class _OpenIncident(NamedTuple):
    """An incident without a completed step after it. ``marks``: when each stage of the recovery was reached."""

    incident: Incident
    marks: dict[str, float]


class Recovery:
    """The failures of one job on this node, the decisions about them, and their records.

    The main thread calls all methods and owns all attributes.
    """

    def __init__(
        self,
        rules: SuperviseRules,
        job: str,
        log: IncidentLog,
        group: str = "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """``group``: the rendezvous' address and id; empty for one node."""
        self.rules, self.log = rules, log
        self.decision: Decision | None = None
        """The last decision. No incarnation has applied its settings yet."""
        self.devices: Callable[[], Sequence[str]] = tuple
        """Returns the lines that accelerators' drivers have logged since the last call."""
        self.on_failure: Callable[[str, str], None] = lambda kind, why: None
        """Called for each failure with its kind and its reason."""
        self.knows_run = False
        """Whether a rank has published where the run is stored."""
        self._job, self._group, self._clock = job, group, clock
        self._past: list[Past] = []
        self._open: _OpenIncident | None = None
        self._own_attempts: set[str] = set()
        """Processes here that were rank 0, as ``HOST:PID`` like a log's writers. Only rank 0 writes a FENCE."""
        self._oom_kills = oom_kills()
        self._stopped_before: set[str] = set()
        """Incidents that stopped an earlier job."""
        self._checked_elsewhere = -math.inf

    @property
    def has_failed(self) -> bool:
        """Whether this job, or the run's job before, has failed."""
        return bool(self._past)

    def learn_run(self, url: str, run: str) -> ByteStore | None:
        """Write incidents to the run's store from now on, and read the earlier ones there.

        Return the store; None if it cannot be opened. It is not tried again.
        """
        self.knows_run, store = True, None
        with contextlib.suppress(RelightError, TypeError):
            store = open_bytes(url)
            self.log.at(store, run)
            self._read_earlier(store, run)
        return store

    def _read_earlier(self, store: ByteStore, run: str) -> None:
        written = read_incidents(store, run, time.time() - INCIDENT_COUNTS_S)
        recent = [incident for incident in written if re.match(r"\d{13}-", incident.id)]
        self._stopped_before = {incident.id for incident in recent if incident.action == "stop"}
        earlier = once_each(recent)
        last = max((index for index, incident in enumerate(earlier) if incident.action == "stop"), default=-1)
        epoch = self._clock() - time.time()
        host = socket.gethostname()
        # only incidents after the last stop count: a person has started the job again after it
        self._past[:0] = [
            Past(*incident.past(host=host), epoch + incident.time_s) for incident in earlier[last + 1 :][-_PAST_MAX:]
        ]

    # -- a failure

    def evidence(
        self,
        incarnation: Incarnation,
        workers: Sequence[Worker],
        *,
        hung: str = "",
        asked_to_end: str = "",
        departure: Departure | None = None,
    ) -> FailureEvidence:
        """Return what is known about the end of an incarnation. Call it once for each: it reads what is new since then.

        ``workers``: exits and errors; heartbeats are added here.
        """
        kills_before, self._oom_kills = self._oom_kills, oom_kills()
        stores = [local_path(beat.url) for beat in incarnation.beats().values() if beat.url]
        urls = {path for path in stores if path is not None}
        kernel = lines_about(kernel_lines(incarnation.began), {*_directories(), *urls}, incarnation.pids.values())
        return FailureEvidence(
            incarnation.with_evidence(workers, hung=bool(hung)),
            hung,
            asked_to_end,
            max(0, self._oom_kills - kills_before),
            (*kernel, *self.devices()),
            tuple(directory for directory in _directories() if _is_full(directory)),
            departure,
        )

    def failure_of(self, incarnation: Incarnation, evidence: FailureEvidence) -> Failure:
        """Return the classified failure."""
        failure = classify(evidence)
        return replace(failure, here=failure.rank is None or failure.rank in incarnation.pids)

    def rollback_applied(self) -> None:
        """Record that an incarnation has restored: a rollback that was decided must not be repeated."""
        if self.decision is not None:
            self.decision = replace(self.decision, settings=once_back(self.decision.settings))
        for last in self._past[-1:]:
            self._past[-1] = last._replace(decision=replace(last.decision, settings=once_back(last.decision.settings)))

    def decide(
        self,
        incarnation: Incarnation,
        evidence: FailureEvidence,
        failure: Failure,
        now: float,
        *,
        noticed: float | None = None,
        drains: bool = False,
    ) -> Decision:
        """Decide about a failure at time ``now``, and record both.

        ``noticed``: when the failure was noticed. ``drains``: whether this machine leaves the job although it works.
        """
        self.on_failure(failure.kind, failure.why)
        decision = decide(failure, self._past, self.rules, now)
        if decision.action not in ("end", "stop", "exclude_node") and self.log.taken_over(self._own_attempts):
            decision = Decision("stop", f"{FENCED}, since before this: {failure.why}")
        if drains and decision.action == "end":
            decision = Decision("exclude_node", decision.reason)
        self.decision = decision
        self._past.append(Past(failure, decision, now))
        incident = self._record(incarnation, evidence, failure, incarnation.meeting)
        died = min((worker.died_at for worker in evidence.workers if worker.died_at), default=now)
        marks = {"died": died, "noticed": noticed or died, "decided": self._clock()}
        self._open = _OpenIncident(incident, marks)
        emit(
            "run.failure",
            f"{failure.kind}: {failure.why}",
            kind=failure.kind,
            step=failure.step,
            rank=failure.rank,
            incident=incident.id,
        )
        wait = f" in {duration_text(decision.delay_s)}" if decision.delay_s else ""
        more = decision.reason.removeprefix(failure.why).lstrip(":; ")
        text = f"→ {decision.action}{wait}" + (f": {more}" if more else "")
        emit("run.decision", text, action=decision.action)
        return decision

    def end_without_failure(self, incarnation: Incarnation, action: str, why: str) -> None:
        """Record that this node ends without a failure of its ranks.

        ``action``: ``stop`` if the job ends, ``exclude_node`` if others may continue. Without this record the last
        decision would be to resume. Nothing is written before the first incarnation.
        """
        if not incarnation.number:
            return
        step = max((beat.step for beat in incarnation.beats().values()), default=-1)
        self.decision = Decision(action, why)
        meeting = f"{incarnation.meeting} ended" if incarnation.meeting else ""
        self._record(incarnation, FailureEvidence(()), Failure("network", why, None, step, 0, why), meeting)
        emit("run.decision", f"→ {action}: {why}", action=action)

    # -- how training continues

    def backoff_over(self) -> None:
        """Record that the delay is over; the next incarnation begins."""
        if self._open is not None:
            self._open.marks["waited"] = self._clock()

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process ids of the ranks that were started, by rank."""
        if 0 in pids:
            self._own_attempts.add(f"{socket.gethostname()[:64]}:{pids[0]}")
        if self._open is not None:
            self._open.marks["started"] = self._clock()

    def follow_up(self, incarnation: Incarnation) -> None:
        """Close the open incident once all ranks have completed a step."""
        if self._open is None or not (beats := incarnation.trained()):
            return
        (incident, marks), self._open = self._open, None
        after = recovery_record(incident, marks, beats)
        self.log.write(after)
        from_step = max(min(beat.restored for beat in beats), -1) + 1
        emit(
            "run.recovered",
            f"training again {duration_text(after.seconds['all'])} after the failure, from step {from_step}: "
            f"{count_text(after.steps_lost, 'step')} to repeat",
            incident=incident.id,
            steps_lost=after.steps_lost,
            seconds=after.seconds["all"],
        )

    def stopped_elsewhere(self, began: float) -> str:
        """Return why another node has stopped this job since ``began``, when the incarnation here began.

        Empty if none has. For a node that cannot reach the rendezvous: the rendezvous may have ended with the job.
        Reads the incidents every ``ELSEWHERE_EVERY_S``; calls in between return an empty string.
        """
        now = self._clock()
        if now - self._checked_elsewhere < ELSEWHERE_EVERY_S or not self._group:
            return ""
        self._checked_elsewhere = now
        since = time.time() - (now - began) - (CLOCKS_S if self.knows_run else 0.0)
        incidents = self.log.since(since) or ()
        stops = [
            incident
            for incident in incidents
            if (incident.group, incident.action) == (self._group, "stop") and incident.id not in self._stopped_before
        ]
        return stops[-1].reason if stops else ""

    def _record(self, incarnation: Incarnation, evidence: FailureEvidence, failure: Failure, meeting: str) -> Incident:
        assert self.decision is not None
        incident = incident_of(
            evidence, failure, self.decision, job=self._job, host=socket.gethostname(), life=incarnation.number,
            group=self._group, meeting=meeting,
        )  # fmt: skip
        self.log.write(incident)
        return incident


def recovery_record(incident: Incident, marks: Mapping[str, float], beats: Sequence[Heartbeat]) -> RecoveryRecord:
    """Return the record of a recovery. ``beats``: of all ranks, each after its first step."""
    restored = min(beat.restored for beat in beats)
    stepped = max(beat.first_at for beat in beats)
    last = max(beats, key=lambda beat: beat.restored_at)
    waited = marks.get("waited", marks["decided"])
    started = marks.get("started", marks["decided"])
    seconds = {
        "noticed": marks["noticed"] - marks["died"],
        "decided": marks["decided"] - marks["noticed"],
        "waited": waited - marks["decided"],
        "started": started - waited,
        "began": last.restored_at - last.restore_s - started if last.restored_at else 0.0,
        "restored": last.restore_s,
        "stepped": stepped - last.restored_at if last.restored_at else 0.0,
        "all": stepped - marks["died"],
    }
    lost = max(0, incident.step - max(restored, -1)) if restored != NOT_YET else 0
    rounded = {name: round(max(0.0, value), 4) for name, value in seconds.items()}
    return RecoveryRecord(incident.id, restored, lost, rounded)


def _is_full(directory: str) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free < _FULL_BYTES
    return False


def _directories() -> tuple[str, ...]:
    return tempfile.gettempdir(), shared_pages.MEMORY, os.getcwd()
