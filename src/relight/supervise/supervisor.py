"""One job under watch, life after life: what is seen, what is decided, what is written down. Knows processes by their numbers only."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

from relight.errors import RelightError
from relight.observe import emit
from relight.policy.going_back import SPIKES
from relight.pulse import SETTING as PULSE
from relight.pulse import Beat, read_beat
from relight.pulse.page import NOT_YET, make_page
from relight.store import open_bytes
from relight.supervise import stacks
from relight.supervise.classify import classify
from relight.supervise.decide import Past, Rules, decide
from relight.supervise.facts import Decision, Facts, Worker
from relight.supervise.incidents import After, Book, Incident, incident_of, read_incidents
from relight.supervise.limits import Patience, Sight, Usual, Verdict, Watch
from relight.supervise.procfs import kernel_lines, look_at, oom_kills

_MEMORY = "/dev/shm"  # noqa: S108 - a directory of one's own is made there
_PREFIX = "relight-run-"
REMEMBERED_S = 86400.0
"""Incidents of a run that are older than that say nothing about this job."""


class Supervisor:
    """Of the ranks of one node. Used from one thread."""

    def __init__(self, rules: Rules, patience: Patience, job: str, fallback: Path, clock: Callable[[], float] = time.monotonic) -> None:
        """``fallback``: where incidents are written while the run's store is not known."""
        self._rules, self._usual, self._job, self._clock = rules, Usual(patience), job, clock
        top = Path(_MEMORY if os.access(_MEMORY, os.W_OK) else tempfile.gettempdir())
        _sweep(top)
        self._directory = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=top))
        self._book = Book(fallback)
        self._known = False
        self._past: list[Past] = []
        self._life = 0
        self._pids: dict[int, int] = {}
        self._watch: Watch | None = None
        self._sights: dict[int, Sight] = {}
        self._stacks: dict[int, str] = {}
        self._oom = oom_kills()
        self._began = clock()
        self._open: tuple[Incident, dict[str, float]] | None = None
        """The incident that is not over until a step has ended."""
        self.decision: Decision | None = None
        """What was decided last."""

    def close(self) -> None:
        """Nothing of it is left."""
        shutil.rmtree(self._directory, ignore_errors=True)

    # -- a life ----------------------------------------------------------------------------------------------------------------

    def begin(self, ranks: list[int]) -> dict[int, dict[str, str]]:
        """A life of the job begins, with these ranks here: what each one's environment is to have."""
        self._life += 1
        self._pids, self._sights, self._stacks = {}, {}, {}
        self._began = self._clock()
        settings = dict(self.decision.settings) if self.decision is not None else {}
        told: dict[int, dict[str, str]] = {}
        for rank in ranks:
            make_page(self._page(rank))
            self._stack_file(rank).unlink(missing_ok=True)
            pages = {PULSE: str(self._page(rank)), stacks.SETTING: str(self._stack_file(rank))}
            told[rank] = {**pages, SPIKES: f"{self._rules.spikes:g}", **settings}
        self._watch = Watch(self._usual, self._began)
        return told

    def started(self, pids: Mapping[int, int]) -> None:
        """Their processes, by rank."""
        self._pids = dict(pids)
        emit("run.life", f"life {self._life}: {len(pids)} processes started", life=self._life, ranks=len(pids))
        if self._open is not None:
            self._open[1]["started"] = self._clock()

    def look(self) -> str:
        """At all of them. Why the job hangs, or nothing. Some times a second; a second more if somebody is late."""
        if self._watch is None or not self._pids:
            return ""
        sights = self._see()
        self._learn_place()
        self._follow_up()
        verdict = self._watch.see(self._clock(), sights)
        if verdict.what == "look":
            verdict = self._take_stacks()
        if verdict.what == "hang":
            emit("run.hang", f"hang: {verdict.why}", why=verdict.why, ranks=list(verdict.ranks))
            return verdict.why
        return ""

    def failed(self, workers: list[Worker], *, hung: str = "", asked_to_end: str = "", noticed: float | None = None) -> Decision:
        """The life is over, and not as it should be. What is to be done. ``workers``: exits and errors; the rest is filled in here."""
        now = self._clock()
        beats = self.beats()
        seen = tuple(
            replace(
                worker,
                beat=beats.get(worker.rank),
                state=worker.state or self._sights.get(worker.rank, Sight(None)).state,
                stacks=self._stacks.get(worker.rank, "") if hung else "",
            )
            for worker in workers
        )
        kills = oom_kills()
        facts = Facts(seen, hung, asked_to_end, max(0, kills - self._oom), self._kernel(), self._full())
        self._oom = kills
        failure = classify(facts)
        self._learn_place()
        self._follow_up()  # the life may have gone on and ended between two looks
        self.decision = decide(failure, self._past, self._rules, now)
        self._past.append(Past(failure, self.decision, now))
        incident = incident_of(facts, failure, self.decision, job=self._job, host=socket.gethostname(), life=self._life)
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

    def ended(self, signal_name: str) -> Decision:
        """The job was asked to end, and has."""
        return self.failed([Worker(rank) for rank in sorted(self._pids)], asked_to_end=signal_name)

    def waited(self) -> None:
        """The delay is over; the next life begins."""
        if self._open is not None:
            self._open[1]["waited"] = self._clock()

    # -- what there is ---------------------------------------------------------------------------------------------------------

    @property
    def where(self) -> str:
        """Where incidents are written."""
        return self._book.where

    def beats(self) -> dict[int, Beat]:
        """What each rank said last."""
        found = {rank: read_beat(self._page(rank)) for rank in self._pids}
        return {rank: beat for rank, beat in found.items() if beat is not None}

    @property
    def steps(self) -> int:
        """How many steps all ranks of this life have ended."""
        return min((sight.beat.steps if sight.beat is not None else 0 for sight in self._sights.values()), default=0)

    def saved(self) -> bool:
        """Whether what the ranks did last is stored."""
        beats = self.beats().values()
        return bool(beats) and all(beat.durable >= beat.step for beat in beats)

    # -- inside ----------------------------------------------------------------------------------------------------------------

    def _page(self, rank: int) -> Path:
        return self._directory / f"pulse-{rank}"

    def _stack_file(self, rank: int) -> Path:
        return self._directory / f"stacks-{rank}"

    def _see(self) -> dict[int, Sight]:
        found = {}
        for rank, pid in self._pids.items():
            process = look_at(pid)
            beat = read_beat(self._page(rank)) or self._sights.get(rank, Sight(None)).beat
            found[rank] = Sight(beat, process.state, process.cpu_s, process.moved_bytes)
        self._sights = found
        return found

    def _take_stacks(self) -> Verdict:
        assert self._watch is not None
        now, before = self._clock(), self._see()
        self._stacks = stacks.take(self._pids, {rank: self._stack_file(rank) for rank in self._pids})
        texts = {rank: stacks.of_main_thread(text) for rank, text in self._stacks.items()}
        return self._watch.looked(now, before, texts, self._see())

    def _learn_place(self) -> None:
        """As soon as a rank says where the run is: what came before this job, and where to write."""
        if self._known:
            return
        beat = next((one for one in self.beats().values() if one.url), None)
        if beat is None:
            return
        self._known = True
        with contextlib.suppress(RelightError):
            store = open_bytes(beat.url)
            self._book.at(store, beat.run)
            since = int((time.time() - REMEMBERED_S) * 1000)
            earlier = [one for one in read_incidents(store, beat.run) if int(one.id.partition("-")[0]) >= since]
            last = max((at for at, one in enumerate(earlier) if one.action == "stop"), default=-1)
            now = self._clock()  # somebody has started it again behind a stop: what was before that is not held against it
            self._past[:0] = [Past(*one.past(), now) for one in earlier[last + 1 :][-50:]]

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
        after = After(incident.id, restored, lost, {name: round(max(0.0, value), 4) for name, value in seconds.items()})
        self._book.write(after)
        emit(
            "run.recovered",
            f"training again {after.seconds['all']:.2f} s behind the failure, from step {restored}: {lost} steps to do again",
            incident=incident.id, steps_lost=lost, seconds=after.seconds["all"],
        )  # fmt: skip

    def _kernel(self) -> tuple[str, ...]:
        """What the kernel has said in this life; of processes that it killed, only of this job's."""
        pids = {f"process {pid} " for pid in self._pids.values()}
        lines = kernel_lines(self._began)
        return tuple(line for line in lines if "Killed process" not in line or any(pid in line for pid in pids))

    def _full(self) -> tuple[str, ...]:
        full = []
        for place in (tempfile.gettempdir(), _MEMORY, os.getcwd()):
            with contextlib.suppress(OSError):
                if shutil.disk_usage(place).free < 1 << 20:
                    full.append(place)
        return tuple(full)


def _sweep(top: Path) -> None:
    """What supervisors left that were killed: nobody needs it."""
    for one in top.glob(f"{_PREFIX}*"):
        pid = one.name.removeprefix(_PREFIX).partition("-")[0]
        if pid.isdecimal() and not look_at(int(pid)).state:
            shutil.rmtree(one, ignore_errors=True)


def directories() -> dict[int, Path]:
    """Where the ranks' pages of each supervisor lie that runs on this machine, by its process."""
    found = {}
    for top in {_MEMORY, tempfile.gettempdir()}:
        for one in Path(top).glob(f"{_PREFIX}*"):
            pid = one.name.removeprefix(_PREFIX).partition("-")[0]
            if pid.isdecimal() and look_at(int(pid)).state:
                found[int(pid)] = one
    return found
