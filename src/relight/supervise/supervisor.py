"""Supervises one job across its incarnations: observes its processes, decides about failures, records both."""

from __future__ import annotations

import contextlib
import math
import os
import re
import shutil
import signal
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from relight.comm import new_threads
from relight.errors import RelightError
from relight.heartbeat import (
    HANDING_OVER,
    LATE_AFTER,
    Heartbeat,
    RiskWarning,
    lost_of,
    make_rank_state,
    rank_state_path,
    read_beat,
    risk_path,
    write_request,
    write_risk,
)
from relight.heartbeat import SETTING as HEARTBEAT
from relight.heartbeat.ease import Eased, write_ease
from relight.heartbeat.heartbeat_page import NOT_YET, UPDATING, make_page
from relight.log import Log, fold
from relight.log.identity import now_text
from relight.observe import emit, write_events
from relight.policy.rollback_env import SPIKES, once_back
from relight.prediction import HORIZON_S, Alarm
from relight.save_reason import SaveReason, preventive, requested_by
from relight.store import open_bytes
from relight.supervise import own_memory, stacks
from relight.supervise.agent_watch import AgentWatch
from relight.supervise.classify import classify
from relight.supervise.decide import FENCED, Past, SuperviseRules, decide
from relight.supervise.facts import Decision, Departure, Failure, FailureEvidence, Worker
from relight.supervise.goodput import FIRST, TRAINING, Account, Goodput
from relight.supervise.incidents import Incident, IncidentLog, RecoveryRecord, incident_of, once_each, read_incidents
from relight.supervise.kernel_log import kernel_lines, lines_about
from relight.supervise.limits import HangTimeouts, HangVerdict, JobWatch, LearnedDurations, RankObservation
from relight.supervise.notices import Notices
from relight.supervise.own_memory import make_directory, sweep_memory
from relight.supervise.prediction_thread import FREQUENT_FOR_S, FREQUENT_INTERVAL_S
from relight.supervise.procfs import busy_s, has_handler, oom_kills, sample_agent, sample_process
from relight.supervise.remote_causes import CLOCKS_S, Endings
from relight.supervise.requests import Requests
from relight.supervise.stragglers import Stragglers
from relight.units import duration_text, percent_text

STRAGGLERS_EVERY_S = 1.0
ELSEWHERE_EVERY_S = 5.0
"""Seconds between two checks, on a node without the rendezvous, whether another node has stopped the job."""
ACCOUNT_S = 60.0
"""Seconds between two writes of the job's account."""
CLOSING_S = 20.0
"""Seconds that writing the last account may take. A machine that is wanted back must not wait for a store."""
HANDOVER_BEGINS_S = 3.0
"""Seconds after a rank's failure is known in which another rank must begin the handover or decline it."""
UPDATE_EXTRA_S = 20.0
"""Largest addition to ``HANDOVER_BEGINS_S`` while such a rank is in its optimizer update.

Usually twice a step's time is added.
"""
INCIDENT_COUNTS_S = 86400.0
"""Seconds after which an earlier incident of a run no longer counts for this job."""


class Supervisor:
    """Supervises the ranks of one node. Used from one thread."""

    def __init__(
        self,
        rules: SuperviseRules,
        patience: HangTimeouts,
        job: str,
        fallback: Path,
        clock: Callable[[], float] = time.monotonic,
        notices: Notices | None = None,
        group: str = "",
    ) -> None:
        """``fallback``: directory of incidents without the run's store. ``group``: the rendezvous' address and id."""
        self._group, self._checked_elsewhere = group, -math.inf
        self._charges: set[str] = set()
        """Processes here that were rank 0, as ``HOST:PID`` like a log's writers. Only rank 0 writes a FENCE."""
        self._notices = notices or Notices(())
        self._wanted, self._drains = "", ""
        self._reason: SaveReason | None = None
        self._requests: Requests | None = None
        self._often = (-math.inf, -math.inf)
        """While saves are made more often: the beginning of the last interval, and the end of this state."""
        self._rules, self._usual, self._job, self._clock = rules, LearnedDurations(patience), job, clock
        sweep_memory(top := own_memory.memory())
        self._directory, self._held = make_directory(top)
        self._book = IncidentLog(fallback)
        self._known = False
        self._past: list[Past] = []
        self._life = 0
        self._pids: dict[int, int] = {}
        self._watch: JobWatch | None = None
        self._sights: dict[int, RankObservation] = {}
        self._stacks: dict[int, str] = {}
        self._oom = oom_kills()
        self._began = clock()
        self._open: tuple[Incident, dict[str, float]] | None = None
        """The incident that is open until a step has been completed after it, and its times."""
        self._goodput, self._at, self._kept = Goodput(clock()), now_text(), clock()
        self._endings = Endings(group)
        self._agents, self._stragglers, self._measured = AgentWatch(), Stragglers(), clock()
        self.hung: tuple[int, ...] = ()
        """Ranks of this incarnation that delay the others."""
        self.devices: Callable[[], Sequence[str]] = tuple
        """Returns the lines that accelerators' drivers have logged since the last call."""
        self.on_failure: Callable[[str, str], None] = lambda kind, why: None
        """Called for each failure with its kind and its reason."""
        self.decision: Decision | None = None
        """The last decision. No incarnation has applied its settings yet."""
        self.end_signal = ""
        """The signal that asked the job to end; empty if none has."""
        self._over, self._meeting = True, ""
        """Whether the last incarnation is accounted for, and the name that all nodes give it."""
        self._stopped_before: set[str] = set()
        """Incidents that stopped an earlier job."""
        self._keeping: threading.Thread | None = None

    def close(self) -> None:
        """Write the last account, stop the threads, and remove the directory in memory."""
        if self._known:
            last = threading.Thread(
                target=self._keep_account, args=(self._keeping,), name="relight-account", daemon=True
            )
            if new_threads.start(last):
                last.join(CLOSING_S)
        self._notices.close()
        if self._requests is not None:
            self._requests.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # -- an incarnation

    def begin(self, ranks: list[int], settings: Mapping[str, str], meeting: str = "") -> dict[int, dict[str, str]]:
        """Begin an incarnation of the job with these ranks on this node. Return the environment variables of each rank.

        ``settings``: variables for all ranks. ``meeting``: the name that all nodes give this incarnation, or empty.
        """
        self._life += 1
        self._over, self._meeting = False, meeting
        self._endings.begun(meeting)
        self._pids, self._sights, self._stacks, self.hung = {}, {}, {}, ()
        self._began = self._clock()
        environments: dict[int, dict[str, str]] = {}
        for claim in self._directory.glob("heir-*"):
            claim.unlink(missing_ok=True)
        lost_of(self._page(0)).unlink(missing_ok=True)
        # the predicted failure has happened, or the prediction was for the last incarnation
        risk_path(self._page(0)).unlink(missing_ok=True)
        for rank in ranks:
            make_page(self._page(rank))
            write_request(self._page(rank), None)
            for ahead in (False, True):
                make_rank_state(rank_state_path(self._page(rank), rank, ahead))
            self._stack_file(rank).unlink(missing_ok=True)
            pages = {HEARTBEAT: str(self._page(rank)), stacks.SETTING: str(self._stack_file(rank))}
            environments[rank] = {**pages, SPIKES: f"{self._rules.spikes:g}", **settings}
        self._watch = JobWatch(self._usual, self._began)
        return environments

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process ids of the ranks that were started, by rank."""
        self._pids = dict(pids)
        if 0 in pids:
            self._charges.add(f"{socket.gethostname()[:64]}:{pids[0]}")
        self._goodput.update(self._clock(), "down" if self._past else "starting")
        processes = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
        emit("run.started", f"incarnation {self._life}: {processes} started", life=self._life, ranks=len(pids))
        if self._open is not None:
            self._open[1]["started"] = self._clock()

    def poll(self) -> str:
        """Check all ranks. Return why the job hangs; empty if it does not. Call it some times a second.

        It takes up to a second longer if a rank is late, because it takes stacks.
        """
        if self._watch is None or not self._pids:
            return ""
        sights = self._observe_ranks()
        self._learn_place()
        self._follow_up()
        self._update_account(sights)
        self._poll_agent(sights)
        self._ask_for_save()
        self._poll_stragglers(sights)
        verdict = self._watch.update(self._clock(), sights)
        if verdict.what == "stacks":
            verdict = self._take_stacks()
        if verdict.what == "hang":
            self.hung = verdict.ranks
            emit("run.hang", f"hang: {verdict.why}", why=verdict.why, ranks=list(verdict.ranks))
            return verdict.why
        return ""

    def failed(
        self,
        workers: list[Worker],
        *,
        hung: str = "",
        asked_to_end: str = "",
        noticed: float | None = None,
        departure: Departure | None = None,
    ) -> Decision:
        """Record that the incarnation has failed, and return the decision.

        ``workers``: exits and errors; heartbeats are added here.
        """
        now = self._clock()
        beats = self.beats()
        seen = tuple(
            replace(
                worker,
                beat=beats.get(worker.rank),
                state=worker.state or self._sights.get(worker.rank, RankObservation(None)).state,
                stacks=self._stacks.get(worker.rank, "") if hung else "",
            )
            for worker in workers
        )
        kills = oom_kills()
        facts = FailureEvidence(
            seen,
            hung,
            asked_to_end,
            max(0, kills - self._oom),
            (*self._kernel(), *self.devices()),
            self._full(),
            departure,
        )
        self._oom = kills
        failure = classify(facts)
        failure = replace(failure, here=failure.rank is None or failure.rank in self._pids)
        self._learn_place()
        if not self._over:  # otherwise the job was asked to end between two incarnations
            self._update_account(self._observe_ranks())
            self._follow_up()  # the incarnation may have completed a step and failed between two polls
            self._is_over(failure.kind, now)
        self.on_failure(failure.kind, failure.why)
        self.decision = decide(failure, self._past, self._rules, now)
        if self.decision.action not in ("end", "stop", "exclude_node") and self._book.taken_over(self._charges):
            self.decision = Decision("stop", f"{FENCED}, since before this: {failure.why}")
        if self._drains and self.decision.action == "end":
            self.decision = Decision("exclude_node", self.decision.reason)
        self._past.append(Past(failure, self.decision, now))
        incident = incident_of(
            facts, failure, self.decision, job=self._job, host=socket.gethostname(), life=self._life, group=self._group,
            meeting=self._meeting,
        )  # fmt: skip
        self._book.write(incident)
        died = min((worker.died_at for worker in seen if worker.died_at), default=now)
        self._open = (incident, {"died": died, "noticed": noticed or died, "decided": self._clock()})
        emit(
            "run.failure",
            f"{failure.kind}: {failure.why}",
            kind=failure.kind,
            step=failure.step,
            rank=failure.rank,
            incident=incident.id,
        )
        wait = f" in {duration_text(self.decision.delay_s)}" if self.decision.delay_s else ""
        more = self.decision.reason.removeprefix(failure.why).lstrip(":; ")
        emit(
            "run.decision",
            f"→ {self.decision.action}{wait}" + (f": {more}" if more else ""),
            action=self.decision.action,
        )
        return self.decision

    def gave_up(self, action: str, why: str) -> None:
        """Record that this node ends without a failure of its ranks.

        ``action``: ``stop`` if the job ends, ``exclude_node`` if others may continue. Without this record the last
        decision would be to resume. Nothing is written before the first incarnation.
        """
        if not self._life:
            return
        step = max((beat.step for beat in self.beats().values()), default=-1)
        self.decision = Decision(action, why)
        incident = incident_of(
            FailureEvidence(()), Failure("network", why, None, step, 0, why), self.decision, job=self._job, host=socket.gethostname(),
            life=self._life, group=self._group, meeting=f"{self._meeting} ended" if self._meeting else "",
        )  # fmt: skip
        self._book.write(incident)
        emit("run.decision", f"→ {action}: {why}", action=action)

    def end_for_membership_change(self) -> None:
        """End the incarnation because nodes join or leave. A node that failed records its failure itself."""
        self._update_account(self._observe_ranks())
        self._is_over(FIRST, self._clock())

    def _is_over(self, kind: str, now: float) -> None:
        # a rollback that was decided has been applied
        if any(beat.restored != NOT_YET for beat in self.beats().values()):
            if self.decision is not None:
                self.decision = replace(self.decision, settings=once_back(self.decision.settings))
            for last in self._past[-1:]:
                self._past[-1] = last._replace(
                    decision=replace(last.decision, settings=once_back(last.decision.settings))
                )
        self._endings.ended(self._goodput.failed(now, kind), now - self._began)
        self._over = True

    def ended(self, signal_name: str) -> Decision:
        """Record that the job was asked to end, and has ended."""
        return self.failed(
            [Worker(rank) for rank in sorted(self._pids)], asked_to_end=self.announced or f"{signal_name} came"
        )

    def save_now(self, why: str = "", reason: SaveReason | None = None) -> None:
        """Have the ranks save at the end of their step, and continue. Takes effect at the next poll.

        Call it from any thread or a signal handler. ``reason``: that of the checkpoint. With None it is the signal, and
        ``why`` is only reported. A person's request has precedence over an alarm.
        """
        if reason is not None and (
            self._reason is None or reason.kind == "requested" or self._reason.kind != "requested"
        ):
            self._reason = reason
        self._wanted = why if reason is None else reason.text

    def request_save(self, requester: str) -> None:
        """Have the ranks save. The checkpoint's reason is the request of ``requester``. Any thread."""
        self.save_now(reason=requested_by(requester))

    def why_unreachable(self) -> str:
        """Return why no rank here can be asked to save now; empty if one can. Any thread."""
        pids = self._pids
        if any(has_handler(pid, signal.SIGUSR1) for pid in list(pids.values())):
            return ""
        return (
            "no rank handles SIGUSR1: no Checkpointer was created yet, or it has signals=False"
            if pids
            else "the job is not running now"
        )

    def backoff_over(self) -> None:
        """Record that the delay is over; the next incarnation begins."""
        if self._open is not None:
            self._open[1]["waited"] = self._clock()

    # -- state and requests ----------------------------------------------------------------------------------------

    def ease(self, share: float, until: float) -> bool:
        """Have this node's ranks pause for a share of the time until ``until``; 0: no pause. Any thread.

        Return whether that could be published.
        """
        try:
            write_ease(self._page(0), Eased(share, until) if share else None)
        except OSError:
            return False
        return True

    def foreseen(self, alarm: Alarm, drain: bool) -> bool:
        """Act on the prediction of a failure. Any thread. ``drain``: whether this machine may leave the job for it.

        Return whether the machine leaves the job. No other action here averts the failure.
        """
        self.save_now(reason=preventive(alarm.why))
        with contextlib.suppress(OSError):
            write_risk(self._page(0), RiskWarning(self._clock(), alarm.likely, HORIZON_S, alarm.why))
        if alarm.action == "save more often":
            self._often = (self._clock(), self._clock() + FREQUENT_FOR_S)
        elif alarm.action == "drain node" and drain:
            self._drains = f"{alarm.why}; {alarm.reason}"
            return True
        return False

    def seen(self) -> dict[int, tuple[int, Heartbeat]]:
        """Return the process id and the last heartbeat of each rank. Any thread."""
        pids = self._pids
        return {rank: (pids[rank], beat) for rank, beat in self.beats().items() if rank in pids}

    @property
    def drains(self) -> str:
        """Return why this machine leaves the job although it works; empty if it does not leave."""
        return self._drains

    @property
    def announced(self) -> str:
        """Return the signal, notice or alarm that asked this node's part of the job to end; empty if there was none."""
        return self.end_signal or self._notices.announcement or self._drains

    @property
    def where(self) -> str:
        """Return where incidents are written."""
        return self._book.where

    def beats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank."""
        return {rank: beat for rank in self._pids if (beat := read_beat(self._page(rank))) is not None}

    @property
    def steps(self) -> int:
        """Return how many steps all ranks of this incarnation have completed."""
        return min((sight.beat.steps if sight.beat is not None else 0 for sight in self._sights.values()), default=0)

    @property
    def ahead_bytes(self) -> int:
        """Return the most memory, in bytes, of a rank at its ``relight.standby()``; 0 until all have called it."""
        sizes = [sight.beat.ahead if sight.beat is not None else 0 for sight in self._sights.values()]
        return max(sizes) if sizes and all(sizes) else 0

    def is_lost(self) -> None:
        """Publish that a rank has failed. The others read it when their step ends, if no collective fails before."""
        self._update_account(self._observe_ranks())  # the time from now on does not count as training
        with contextlib.suppress(OSError):
            lost_of(self._page(0)).touch()

    def ended_elsewhere(self) -> str:
        """Return why another node has stopped this job since the last incarnation began here; empty if none has.

        For a node that cannot reach the rendezvous: the rendezvous may have ended with the job. Reads the incidents
        every ``ELSEWHERE_EVERY_S``; calls in between return an empty string.
        """
        now = self._clock()
        if now - self._checked_elsewhere < ELSEWHERE_EVERY_S or not self._group:
            return ""
        self._checked_elsewhere = now
        since = time.time() - (now - self._began) - (CLOCKS_S if self._known else 0.0)
        incidents = self._book.since(since) or ()
        stops = [
            incident
            for incident in incidents
            if (incident.group, incident.action) == (self._group, "stop") and incident.id not in self._stopped_before
        ]
        return stops[-1].reason if stops else ""

    def handing_over_s(self, alive: Collection[int]) -> float:
        """Return the seconds to begin a handover that these ranks have: infinite during a handover, 0 if none can."""
        beats = self.beats()
        alive_beats = [beats[rank] for rank in alive if rank in beats]
        if any(
            beat.phase == HANDING_OVER and self._clock() - beat.since < LATE_AFTER * beat.expected_s
            for beat in alive_beats
        ):
            return math.inf
        updating = [beat for beat in alive_beats if beat.heir == UPDATING]
        steps_s = [(beat.step_at - beat.first_at) / (beat.steps - 1) for beat in updating if beat.steps > 1]
        return (
            HANDOVER_BEGINS_S + min(UPDATE_EXTRA_S, 2 * max(steps_s, default=0.0))
            if any(beat.heir for beat in alive_beats)
            else 0.0
        )

    def saved(self) -> bool:
        """Return whether the last completed step is stored.

        A rank that was ended while it waited for its save may not know of the commit. In that case, read the run's log.
        """
        beats = self.beats().values()
        if self._goodput.reached > max((max(beat.step, beat.restored) for beat in beats), default=-1):
            return False  # this incarnation has not reached the furthest step of an earlier one yet
        if not beats or all(beat.durable >= beat.step for beat in beats):
            return bool(beats)
        last = max(beat.step for beat in beats)
        url, run = next((beat.url, beat.run) for beat in beats)
        with contextlib.suppress(RelightError):
            return bool(url) and any(
                checkpoint.step >= last for checkpoint in fold(Log(open_bytes(url), run).read()).live
            )
        return False

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _poll_stragglers(self, sights: Mapping[int, RankObservation]) -> None:
        now = self._clock()
        if now - self._measured < STRAGGLERS_EVERY_S or any(
            sight.beat is None or not sight.beat.steps for sight in sights.values()
        ):
            return
        self._measured = now
        slow = self._stragglers.update(now, {rank: busy_s(pid) for rank, pid in self._pids.items()})
        if slow is not None:
            shares = f"it works {percent_text(slow.share)} of the time, they {percent_text(slow.others)}"
            text = f"the others wait for rank {slow.rank}: {shares}"
            emit("run.straggler", text, rank=slow.rank, share=round(slow.share, 3), others=round(slow.others, 3))

    def _ask_for_save(self) -> None:
        """Send SIGUSR1 to one rank, which has the other ranks save with it."""
        now, (began, until) = self._clock(), self._often
        if FREQUENT_INTERVAL_S <= now - began < until - began:
            self._often = (now, until)
            if not self._wanted:
                self.save_now(reason=preventive("saving more often because of an earlier warning"))
        if not self._wanted:
            return
        for rank, pid in sorted(self._pids.items()):
            if has_handler(pid, signal.SIGUSR1):
                why, self._wanted = self._wanted, ""
                reason, self._reason = self._reason, None
                write_request(self._page(min(self._pids)), reason)  # before the signal: the save reads it there
                emit("run.save", f"saving now: {why}", why=why, rank=rank)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)
                return

    def _poll_agent(self, sights: Mapping[int, RankObservation]) -> None:
        """Kill an agent that is stuck.

        Ranks that wait for it then write their saves themselves. The next save starts a new agent.
        """
        stuck = self._agents.update(
            self._clock(), [sight.beat for sight in sights.values() if sight.beat is not None], sample_agent
        )
        if stuck is not None:
            emit("agent.hung", f"{stuck.why}; it is killed, and the next save starts another agent", pid=stuck.pid)
            with contextlib.suppress(OSError):
                os.kill(stuck.pid, signal.SIGKILL)

    def _update_account(self, sights: Mapping[int, RankObservation]) -> None:
        """Add the time since the last poll to the account, and write the account every ``ACCOUNT_S``."""
        beats = [sight.beat or Heartbeat(phase="starting") for sight in sights.values()]
        if not beats:
            return
        now, elsewhere = self._clock(), [beat.phase for beat in beats if beat.phase not in (TRAINING, HANDING_OVER)]
        last = min(beats, key=lambda beat: beat.steps)
        self._goodput.update(now, elsewhere[0] if elsewhere else TRAINING, last.step, last.steps)
        if self._known and now - self._kept >= ACCOUNT_S and (self._keeping is None or not self._keeping.is_alive()):
            self._kept, account = now, self._goodput.account(self._job, self._at)
            self._keeping = threading.Thread(target=self._keep, args=(account,), name="relight-account", daemon=True)
            new_threads.start(self._keeping)

    def _keep_account(self, before: threading.Thread | None = None) -> None:
        """Write the last account, after the thread ``before`` has written its own."""
        if before is not None:
            before.join()
        self._endings.learn(self._goodput, self._book)
        self._book.keep(self._goodput.account(self._job, self._at))

    def _keep(self, account: Account) -> None:
        """Write an account. Runs in a thread, so that the supervisor does not wait for the store."""
        self._book.keep(account)
        self._endings.learn(self._goodput, self._book)

    def _page(self, rank: int) -> Path:
        return self._directory / f"heartbeat-{rank}"

    def _stack_file(self, rank: int) -> Path:
        return self._directory / f"stacks-{rank}"

    def _observe_ranks(self) -> dict[int, RankObservation]:
        sights = {}
        for rank, pid in self._pids.items():
            process = sample_process(pid)
            beat = read_beat(self._page(rank)) or self._sights.get(rank, RankObservation(None)).beat
            sights[rank] = RankObservation(beat, process.state, process.cpu_s, process.moved_bytes)
        self._sights = sights
        return sights

    def _take_stacks(self) -> HangVerdict:
        assert self._watch is not None
        now, before = self._clock(), self._observe_ranks()
        self._stacks = stacks.take(self._pids, {rank: self._stack_file(rank) for rank in self._pids})
        texts = {rank: stacks.of_main_thread(text) for rank, text in self._stacks.items()}
        return self._watch.judge_stacks(now, before, texts, self._observe_ranks())

    def _learn_place(self) -> None:
        """Once a rank has published the run's store, read the earlier incidents there, and write new ones to it."""
        if self._known:
            return
        beat = next((beat for beat in self.beats().values() if beat.url), None)
        if beat is None:
            return
        self._known = True
        write_events(beat.url, beat.run, role="supervisor")
        with contextlib.suppress(RelightError, TypeError):
            store = open_bytes(beat.url)
            self._book.at(store, beat.run)
            self._requests = Requests(
                store, beat.run, mine=lambda: 0 in self._pids, cannot=self.why_unreachable, obey=self.request_save
            )
            self._requests.start()
            written = read_incidents(store, beat.run, time.time() - INCIDENT_COUNTS_S)
            recent = [incident for incident in written if re.match(r"\d{13}-", incident.id)]
            self._stopped_before = {incident.id for incident in recent if incident.action == "stop"}
            earlier = once_each(recent)
            last = max((index for index, incident in enumerate(earlier) if incident.action == "stop"), default=-1)
            epoch = self._clock() - time.time()
            host = socket.gethostname()
            # only incidents after the last stop count: a person has started the job again after it
            self._past[:0] = [
                Past(*incident.past(host=host), epoch + incident.time_s) for incident in earlier[last + 1 :][-50:]
            ]

    def _follow_up(self) -> None:
        """Close the open incident once all ranks have completed a step."""
        if self._open is None:
            return
        beats = list(self.beats().values())
        if not beats or len(beats) < len(self._pids) or not all(beat.steps for beat in beats):
            return
        incident, marks = self._open
        self._open = None
        restored = min(beat.restored for beat in beats)
        stepped = max(beat.first_at for beat in beats)
        last = max(beats, key=lambda beat: beat.restored_at)
        started = marks.get("started", marks["decided"])
        seconds = {
            "noticed": marks["noticed"] - marks["died"],
            "decided": marks["decided"] - marks["noticed"],
            "waited": marks.get("waited", marks["decided"]) - marks["decided"],
            "started": started - marks.get("waited", marks["decided"]),
            "began": last.restored_at - last.restore_s - started if last.restored_at else 0.0,
            "restored": last.restore_s,
            "stepped": stepped - last.restored_at if last.restored_at else 0.0,
            "all": stepped - marks["died"],
        }
        lost = max(0, incident.step - max(restored, -1)) if restored != NOT_YET else 0
        after = RecoveryRecord(
            incident.id, restored, lost, {name: round(max(0.0, value), 4) for name, value in seconds.items()}
        )
        self._book.write(after)
        emit(
            "run.recovered",
            f"training again {duration_text(after.seconds['all'])} after the failure, "
            f"from step {max(restored, -1) + 1}: {lost} steps to repeat",
            incident=incident.id,
            steps_lost=lost,
            seconds=after.seconds["all"],
        )

    def _kernel(self) -> tuple[str, ...]:
        """Return the kernel's messages during this incarnation, without those about other jobs."""
        places = {*_directories(), *(beat.url for beat in self.beats().values() if beat.url and "://" not in beat.url)}
        return lines_about(kernel_lines(self._began), places, self._pids.values())

    def _full(self) -> tuple[str, ...]:
        return tuple(directory for directory in _directories() if _is_full(directory))


def _is_full(directory: str) -> bool:
    with contextlib.suppress(OSError):
        return shutil.disk_usage(directory).free < 1 << 20
    return False


def _directories() -> tuple[str, ...]:
    return tempfile.gettempdir(), own_memory.MEMORY, os.getcwd()
