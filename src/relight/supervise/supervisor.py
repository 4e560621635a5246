"""One job under watch, life after life: what is seen, what is decided, what is written down. Knows processes by their numbers only."""

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

from relight.errors import RelightError
from relight.heartbeat import (
    ASKED_FOR,
    FORESEEN,
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
from relight.heartbeat import SETTING as PULSE
from relight.heartbeat.ease import Eased, write_ease
from relight.heartbeat.heartbeat_page import NOT_YET, UPDATING, make_page
from relight.log import Log, fold
from relight.log.identity import now_text
from relight.observe import emit, write_events
from relight.policy.rollback_env import SPIKES, once_back
from relight.prediction import HORIZON_S, Alarm
from relight.store import open_bytes
from relight.supervise import own_memory, stacks
from relight.supervise.agent_watch import AgentWatch
from relight.supervise.classify import classify
from relight.supervise.decide import FENCED, Past, SuperviseRules, decide
from relight.supervise.facts import Decision, Departure, Failure, FailureEvidence, Worker
from relight.supervise.goodput import FIRST, TRAINING, Account, Goodput
from relight.supervise.incidents import Incident, IncidentLog, RecoveryRecord, incident_of, once_each, read_incidents
from relight.supervise.limits import HangTimeouts, HangVerdict, JobWatch, LearnedDurations, RankObservation
from relight.supervise.notices import Notices
from relight.supervise.own_memory import make_directory, sweep_memory
from relight.supervise.prediction_thread import OFTEN_FOR_S, OFTEN_S
from relight.supervise.procfs import ProcessSample, busy_s, catches, command_of, kernel_lines, oom_kills, sample_process
from relight.supervise.remote_causes import CLOCKS_S, Endings
from relight.supervise.requests import Requests
from relight.supervise.stragglers import Stragglers

_AGENT = "relight.agent.server"
"""How the process that writes saves is started."""
STRAGGLERS_EVERY_S = 1.0
ELSEWHERE_EVERY_S = 5.0
"""How often a node that cannot meet the others looks whether one of them has stopped the job."""
ACCOUNT_S = 60.0
"""So often it is written down where the time went."""
CLOSING_S = 20.0
"""The last one may take so long: whoever wants the machine back does not wait for a store."""
HEIR_S = 3.0
"""A rank that can save what all held has so long to begin with it, or to say that it will not, once another's failure is known."""
MIDST_S = 20.0
"""At most so much longer, if it is in the midst of its update: usually, twice a step."""
_REASON_MAX = 200
"""Letters of an alarm that a checkpoint's reason has."""
REMEMBERED_S = 86400.0
"""Incidents of a run that are older than that say nothing about this job."""


class Supervisor:
    """Of the ranks of one node. Used from one thread."""

    def __init__(
        self, rules: SuperviseRules, patience: HangTimeouts, job: str, fallback: Path, clock: Callable[[], float] = time.monotonic,
        notices: Notices | None = None, group: str = "",
    ) -> None:  # fmt: skip
        """``fallback``: where incidents are written while the run's store is not known. ``group``: where the job's nodes meet."""
        self._group, self._looked_elsewhere = group, -math.inf
        self._charges: set[str] = set()
        """The processes here that were rank 0, as a log names who writes it: only that takes charge of a run."""
        self._notices = notices or Notices(())
        self._wanted, self._reason, self._drains = "", "", ""
        self._requests: Requests | None = None
        self._often = (-math.inf, -math.inf)
        """When saves that are made more often began last, and until when they are."""
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
        """The incident that is not over until a step has ended."""
        self._goodput, self._at, self._kept = Goodput(clock()), now_text(), clock()
        self._endings = Endings(group)
        self._agents, self._stragglers, self._measured = AgentWatch(), Stragglers(), clock()
        self.hung: tuple[int, ...] = ()
        """Ranks that are taken to hold the others up, of this life."""
        self.devices: Callable[[], Sequence[str]] = tuple
        """What accelerators' drivers have said since it was last asked."""
        self.tells: Callable[[str, str], None] = lambda kind, why: None
        """Told of each failure: its kind, and why."""
        self.decision: Decision | None = None
        """What was decided last; of what it tells the next life, what none has done yet."""
        self.heard = ""
        """Which signal said that the job is to end."""
        self._over, self._meeting = True, ""
        """Whether the life that was last is accounted for, and what all nodes call it."""
        self._stopped_before: set[str] = set()
        """Incidents that stopped an earlier job."""
        self._keeping: threading.Thread | None = None

    def close(self) -> None:
        """Nothing of it is left here."""
        if self._known:
            last = threading.Thread(target=self._keep_account, args=(self._keeping,), name="relight-account", daemon=True)
            last.start()
            last.join(CLOSING_S)
        self._notices.close()
        if self._requests is not None:
            self._requests.close()
        shutil.rmtree(self._directory, ignore_errors=True)
        if self._held >= 0:
            os.close(self._held)
            self._held = -1

    # -- a life ----------------------------------------------------------------------------------------------------------------

    def begin(self, ranks: list[int], settings: Mapping[str, str], meeting: str = "") -> dict[int, dict[str, str]]:
        """A life of the job begins, with these ranks here: what each one's environment is to have. ``settings``: what all are told;
        ``meeting``: what all nodes call this life, if they do."""
        self._life += 1
        self._over, self._meeting = False, meeting
        self._endings.begun(meeting)
        self._pids, self._sights, self._stacks, self.hung = {}, {}, {}, ()
        self._began = self._clock()
        told: dict[int, dict[str, str]] = {}
        for claim in self._directory.glob("heir-*"):
            claim.unlink(missing_ok=True)
        lost_of(self._page(0)).unlink(missing_ok=True)
        risk_path(self._page(0)).unlink(missing_ok=True)  # what was foreseen has come, or was of another life
        for rank in ranks:
            make_page(self._page(rank))
            write_request(self._page(rank), "")
            for ahead in (False, True):
                make_rank_state(rank_state_path(self._page(rank), rank, ahead))
            self._stack_file(rank).unlink(missing_ok=True)
            pages = {PULSE: str(self._page(rank)), stacks.SETTING: str(self._stack_file(rank))}
            told[rank] = {**pages, SPIKES: f"{self._rules.spikes:g}", **settings}
        self._watch = JobWatch(self._usual, self._began)
        return told

    def started(self, pids: Mapping[int, int]) -> None:
        """Their processes, by rank."""
        self._pids = dict(pids)
        if 0 in pids:
            self._charges.add(f"{socket.gethostname()[:64]}:{pids[0]}")
        self._goodput.update(self._clock(), "down" if self._past else "starting")
        processes = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
        emit("run.started", f"life {self._life}: {processes} started", life=self._life, ranks=len(pids))
        if self._open is not None:
            self._open[1]["started"] = self._clock()

    def poll(self) -> str:
        """At all of them. Why the job hangs, or nothing. Some times a second; a second more if somebody is late."""
        if self._watch is None or not self._pids:
            return ""
        sights = self._observe_ranks()
        self._learn_place()
        self._follow_up()
        self._reckon(sights)
        self._poll_agent(sights)
        self._ask_for_save()
        self._poll_stragglers(sights)
        verdict = self._watch.update(self._clock(), sights)
        if verdict.what == "look":
            verdict = self._take_stacks()
        if verdict.what == "hang":
            self.hung = verdict.ranks
            emit("run.hang", f"hang: {verdict.why}", why=verdict.why, ranks=list(verdict.ranks))
            return verdict.why
        return ""

    def failed(
        self, workers: list[Worker], *, hung: str = "", asked_to_end: str = "", noticed: float | None = None,
        departure: Departure | None = None,
    ) -> Decision:  # fmt: skip
        """The life is over, and not as it should be. What is to be done. ``workers``: exits and errors; the rest is filled in here."""
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
            seen, hung, asked_to_end, max(0, kills - self._oom), (*self._kernel(), *self.devices()), self._full(), departure
        )
        self._oom = kills
        failure = classify(facts)
        failure = replace(failure, here=failure.rank is None or failure.rank in self._pids)
        self._learn_place()
        if not self._over:  # else it is asked to end between two lives
            self._reckon(self._observe_ranks())
            self._follow_up()  # the life may have gone on and ended between two looks
            self._is_over(failure.kind, now)
        self.tells(failure.kind, failure.why)
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
            kind=failure.kind, step=failure.step, rank=failure.rank, incident=incident.id,
        )  # fmt: skip
        wait = f" in {self.decision.delay_s:.0f} s" if self.decision.delay_s else ""
        more = self.decision.reason.removeprefix(failure.why).lstrip(":; ")
        emit("run.decision", f"→ {self.decision.action}{wait}" + (f": {more}" if more else ""), action=self.decision.action)
        return self.decision

    def gave_up(self, action: str, why: str) -> None:
        """Write down that this node ends without a failure of its ranks: ``stop`` if the job ends, ``leave`` if others may continue.

        Without it an operator sees a decision to resume as the last one. Nothing is written before the first life.
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
        """The life is over as others come or go: if one of them failed, its own node writes that down."""
        self._reckon(self._observe_ranks())
        self._is_over(FIRST, self._clock())

    def _is_over(self, kind: str, now: float) -> None:
        if any(beat.restored != NOT_YET for beat in self.beats().values()):  # it has gone back, if it was told to
            if self.decision is not None:
                self.decision = replace(self.decision, settings=once_back(self.decision.settings))
            for last in self._past[-1:]:
                self._past[-1] = last._replace(decision=replace(last.decision, settings=once_back(last.decision.settings)))
        self._endings.ended(self._goodput.failed(now, kind), now - self._began)
        self._over = True

    def ended(self, signal_name: str) -> Decision:
        """The job was asked to end, and has."""
        return self.failed([Worker(rank) for rank in sorted(self._pids)], asked_to_end=self.announced or f"{signal_name} came")

    def save_now(self, why: str, *, named: bool = False) -> None:
        """Have the ranks save at the end of their step, and go on. Any thread, and a signal's handler: it is done at the next look.

        ``named``: the checkpoint's reason is ``why``, else the name of the signal. A person's request goes before an alarm.
        """
        if named and (why.startswith(ASKED_FOR) or not self._reason.startswith(ASKED_FOR)):
            self._reason = why
        self._wanted = why

    def request_save(self, who: str) -> None:
        """The same, for somebody whom the save is to name. Any thread."""
        self.save_now(f"{ASKED_FOR}{who}", named=True)

    def why_unreachable(self) -> str:
        """Why no rank here can be asked to save now; empty if one can. Any thread."""
        pids = self._pids
        if any(catches(pid, signal.SIGUSR1) for pid in list(pids.values())):
            return ""
        return "no rank takes SIGUSR1: its Checkpointer is not there yet, or has signals=False" if pids else "the job is not running now"

    def backoff_over(self) -> None:
        """The delay is over; the next life begins."""
        if self._open is not None:
            self._open[1]["waited"] = self._clock()

    # -- what there is ---------------------------------------------------------------------------------------------------------

    def ease(self, share: float, until: float) -> bool:
        """Have this node's ranks pause for a share of the time; 0: no more. Return whether they could be asked. Any thread."""
        try:
            write_ease(self._page(0), Eased(share, until) if share else None)
        except OSError:
            return False
        return True

    def foreseen(self, alarm: Alarm, drain: bool) -> bool:
        """Act on a warning that something is about to go wrong. Any thread. ``drain``: whether the machine may be left for that.

        Return whether it is: what else is done here does not keep the failure away.
        """
        self.save_now(f"{FORESEEN}{alarm.why}"[:_REASON_MAX], named=True)
        with contextlib.suppress(OSError):
            write_risk(self._page(0), RiskWarning(self._clock(), alarm.likely, HORIZON_S, alarm.why))
        if alarm.action == "save more often":
            self._often = (self._clock(), self._clock() + OFTEN_FOR_S)
        elif alarm.action == "drain node" and drain:
            self._drains = f"{alarm.why}; {alarm.reason}"
            return True
        return False

    def seen(self) -> dict[int, tuple[int, Heartbeat]]:
        """Of each rank its process, and what it said last. Any thread."""
        pids = self._pids
        return {rank: (pids[rank], beat) for rank, beat in self.beats().items() if rank in pids}

    @property
    def drains(self) -> str:
        """Why this machine is left, though it works; empty if it is not."""
        return self._drains

    @property
    def announced(self) -> str:
        """What says that the job is to end here, a signal or something else; empty if nothing does."""
        return self.heard or self._notices.heard or self._drains

    @property
    def where(self) -> str:
        """Where incidents are written."""
        return self._book.where

    def beats(self) -> dict[int, Heartbeat]:
        """What each rank said last."""
        found = {rank: read_beat(self._page(rank)) for rank in self._pids}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    @property
    def steps(self) -> int:
        """How many steps all ranks of this life have ended."""
        return min((sight.beat.steps if sight.beat is not None else 0 for sight in self._sights.values()), default=0)

    @property
    def ahead_bytes(self) -> int:
        """What each rank held at the place where its script may be left waiting; 0: not all have such a place."""
        held = [sight.beat.ahead if sight.beat is not None else 0 for sight in self._sights.values()]
        return max(held) if held and all(held) else 0

    def is_lost(self) -> None:
        """A rank has failed: the others hear of it at the end of their step, if no exchange tells them before."""
        self._reckon(self._observe_ranks())  # what comes now is no training
        with contextlib.suppress(OSError):
            lost_of(self._page(0)).touch()

    def ended_elsewhere(self) -> str:
        """Why another node has stopped this job since its last life began here; empty if none has, or as long as it is not asked again.

        What a node that cannot meet the others any more goes by: whoever held the rendezvous may be gone as the job is over."""
        now = self._clock()
        if now - self._looked_elsewhere < ELSEWHERE_EVERY_S or not self._group:
            return ""
        self._looked_elsewhere = now
        since = time.time() - (now - self._began) - (CLOCKS_S if self._known else 0.0)
        found = [one for one in self._book.since(since) or () if (one.group, one.action) == (self._group, "stop")]
        stops = [one for one in found if one.id not in self._stopped_before]
        return stops[-1].reason if stops else ""

    def handing_over_s(self, alive: Collection[int]) -> float:
        """How long one of these ranks has to begin to save what all held: for ever if one does, not at all if none can."""
        beats = self.beats()
        known = [beats[rank] for rank in alive if rank in beats]
        if any(beat.phase == HANDING_OVER and self._clock() - beat.since < LATE_AFTER * beat.expected_s for beat in known):
            return math.inf
        updating = [beat for beat in known if beat.heir == UPDATING]
        steps_s = [(beat.step_at - beat.first_at) / (beat.steps - 1) for beat in updating if beat.steps > 1]
        return HEIR_S + min(MIDST_S, 2 * max(steps_s, default=0.0)) if any(beat.heir for beat in known) else 0.0

    def saved(self) -> bool:
        """Whether what the ranks did last is stored. One that was ended while it waited for that may not have heard of it."""
        beats = self.beats().values()
        if self._goodput.reached > max((max(beat.step, beat.restored) for beat in beats), default=-1):
            return False  # what an earlier life did was not done again yet
        if not beats or all(beat.durable >= beat.step for beat in beats):
            return bool(beats)
        last = max(beat.step for beat in beats)
        url, run = next((beat.url, beat.run) for beat in beats)
        with contextlib.suppress(RelightError):
            return bool(url) and any(one.step >= last for one in fold(Log(open_bytes(url), run).read()).live)
        return False

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _poll_stragglers(self, sights: Mapping[int, RankObservation]) -> None:
        now = self._clock()
        if now - self._measured < STRAGGLERS_EVERY_S or any(sight.beat is None or not sight.beat.steps for sight in sights.values()):
            return
        self._measured = now
        found = self._stragglers.update(now, {rank: busy_s(pid) for rank, pid in self._pids.items()})
        if found is not None:
            say = f"the others wait for rank {found.rank}: it works {100 * found.share:.0f} % of the time, they {100 * found.others:.0f} %"
            emit("run.straggler", say, rank=found.rank, share=round(found.share, 3), others=round(found.others, 3))

    def _ask_for_save(self) -> None:
        """One rank is asked, and has the others save with it."""
        now, (began, until) = self._clock(), self._often
        if OFTEN_S <= now - began < until - began:
            self._often = (now, until)
            if not self._wanted:
                self.save_now(f"{FORESEEN}saving more often, as something is not as it was", named=True)
        if not self._wanted:
            return
        for rank, pid in sorted(self._pids.items()):
            if catches(pid, signal.SIGUSR1):
                why, self._wanted = self._wanted, ""
                reason, self._reason = self._reason, ""
                write_request(self._page(min(self._pids)), reason)  # before the signal: the save looks there
                emit("run.save", f"saving now: {why}", why=why, rank=rank)
                with contextlib.suppress(OSError):
                    os.kill(pid, signal.SIGUSR1)
                return

    def _poll_agent(self, sights: Mapping[int, RankObservation]) -> None:
        """One that has stopped is ended: ranks that wait for it then write their saves themselves, and the next save has a new one."""
        stuck = self._agents.update(self._clock(), [sight.beat for sight in sights.values() if sight.beat is not None], _agent_at)
        if stuck is not None:
            emit("agent.hung", f"{stuck.why}; it is ended, and the next save has another", pid=stuck.pid)
            with contextlib.suppress(OSError):
                os.kill(stuck.pid, signal.SIGKILL)

    def _reckon(self, sights: Mapping[int, RankObservation]) -> None:
        """Where the time since the last look went."""
        beats = [sight.beat or Heartbeat(phase="starting") for sight in sights.values()]
        if not beats:
            return
        now, elsewhere = self._clock(), [beat.phase for beat in beats if beat.phase not in (TRAINING, HANDING_OVER)]
        last = min(beats, key=lambda beat: beat.steps)
        self._goodput.update(now, elsewhere[0] if elsewhere else TRAINING, last.step, last.steps)
        if self._known and now - self._kept >= ACCOUNT_S and (self._keeping is None or not self._keeping.is_alive()):
            self._kept, account = now, self._goodput.account(self._job, self._at)
            self._keeping = threading.Thread(target=self._keep, args=(account,), name="relight-account", daemon=True)
            self._keeping.start()

    def _keep_account(self, before: threading.Thread | None = None) -> None:
        """The last one, behind the one ``before``."""
        if before is not None:
            before.join()
        self._endings.learn(self._goodput, self._book)
        self._book.keep(self._goodput.account(self._job, self._at))

    def _keep(self, account: Account) -> None:
        """Ranks are looked after meanwhile, however long the store takes."""
        self._book.keep(account)
        self._endings.learn(self._goodput, self._book)

    def _page(self, rank: int) -> Path:
        return self._directory / f"pulse-{rank}"

    def _stack_file(self, rank: int) -> Path:
        return self._directory / f"stacks-{rank}"

    def _observe_ranks(self) -> dict[int, RankObservation]:
        found = {}
        for rank, pid in self._pids.items():
            process = sample_process(pid)
            beat = read_beat(self._page(rank)) or self._sights.get(rank, RankObservation(None)).beat
            found[rank] = RankObservation(beat, process.state, process.cpu_s, process.moved_bytes)
        self._sights = found
        return found

    def _take_stacks(self) -> HangVerdict:
        assert self._watch is not None
        now, before = self._clock(), self._observe_ranks()
        self._stacks = stacks.take(self._pids, {rank: self._stack_file(rank) for rank in self._pids})
        texts = {rank: stacks.of_main_thread(text) for rank, text in self._stacks.items()}
        return self._watch.looked(now, before, texts, self._observe_ranks())

    def _learn_place(self) -> None:
        """As soon as a rank says where the run is: what came before this job, and where to write."""
        if self._known:
            return
        beat = next((one for one in self.beats().values() if one.url), None)
        if beat is None:
            return
        self._known = True
        write_events(beat.url, beat.run, role="supervisor")
        with contextlib.suppress(RelightError, TypeError):
            store = open_bytes(beat.url)
            self._book.at(store, beat.run)
            self._requests = Requests(store, beat.run, mine=lambda: 0 in self._pids, cannot=self.why_unreachable, obey=self.request_save)
            self._requests.start()
            recent = [one for one in read_incidents(store, beat.run, time.time() - REMEMBERED_S) if re.match(r"\d{13}-", one.id)]
            self._stopped_before = {one.id for one in recent if one.action == "stop"}
            earlier = once_each(recent)
            last = max((at for at, one in enumerate(earlier) if one.action == "stop"), default=-1)
            epoch = self._clock() - time.time()
            here = socket.gethostname()  # somebody has started it again behind a stop: what was before that is not held against it
            self._past[:0] = [Past(*one.past(here=here), epoch + one.time_s) for one in earlier[last + 1 :][-50:]]

    def _follow_up(self) -> None:
        """An incident is over when all ranks have ended a step."""
        if self._open is None:
            return
        known = list(self.beats().values())
        if not known or len(known) < len(self._pids) or not all(beat.steps for beat in known):
            return
        incident, marks = self._open
        self._open = None
        restored = min(beat.restored for beat in known)
        stepped = max(beat.first_at for beat in known)
        last = max(known, key=lambda beat: beat.restored_at)
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
        after = RecoveryRecord(incident.id, restored, lost, {name: round(max(0.0, value), 4) for name, value in seconds.items()})
        self._book.write(after)
        emit(
            "run.recovered",
            f"training again {after.seconds['all']:.2f} s behind the failure, from step {max(restored, -1) + 1}: {lost} steps to do again",
            incident=incident.id, steps_lost=lost, seconds=after.seconds["all"],
        )  # fmt: skip

    def _kernel(self) -> tuple[str, ...]:
        """What the kernel has said in this life; of processes that it killed, only of this job's."""
        pids = {f"process {pid} " for pid in self._pids.values()}
        lines = kernel_lines(self._began)
        return tuple(line for line in lines if "Killed process" not in line or any(pid in line for pid in pids))

    def _full(self) -> tuple[str, ...]:
        full = []
        for place in (tempfile.gettempdir(), own_memory.MEMORY, os.getcwd()):
            with contextlib.suppress(OSError):
                if shutil.disk_usage(place).free < 1 << 20:
                    full.append(place)
        return tuple(full)


def _agent_at(pid: int) -> ProcessSample:
    """The agent with that number; as if nobody were there if another process has it by now."""
    return sample_process(pid) if _AGENT in command_of(pid) else ProcessSample()
