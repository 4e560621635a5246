"""One incarnation of a node's ranks: their processes, heartbeats, hangs and stacks."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace
from typing import NamedTuple

from relight.errors import RelightError
from relight.heartbeat import HANDING_OVER, LATE_AFTER, Heartbeat
from relight.heartbeat.heartbeat_page import NOT_YET, UPDATING
from relight.log import Log, fold
from relight.observe import emit
from relight.settings.supervise_settings import SuperviseSettings
from relight.store import open_bytes
from relight.supervise import stacks
from relight.supervise.agent_watch import AgentWatch
from relight.supervise.facts import Worker
from relight.supervise.limits import JobWatch, LearnedDurations, RankObservation
from relight.supervise.procfs import busy_s, sample_agent, sample_process
from relight.supervise.shared_pages import SharedPages
from relight.supervise.stragglers import Stragglers
from relight.units import percent_text

STRAGGLERS_EVERY_S = 1.0
HANDOVER_BEGINS_S = 3.0
"""Seconds after a rank's failure is known in which another rank must begin the handover or decline it."""
UPDATE_EXTRA_S = 20.0
"""Largest addition to ``HANDOVER_BEGINS_S`` while such a rank is in its optimizer update.

Usually twice a step's time is added.
"""


class JobDetectors(NamedTuple):
    """The detectors of one job. They use in each incarnation what they learned in earlier ones."""

    durations: LearnedDurations
    agents: AgentWatch
    stragglers: Stragglers

    @classmethod
    def starting(cls, settings: SuperviseSettings) -> JobDetectors:
        """Return the detectors of a job that starts."""
        return cls(LearnedDurations(settings), AgentWatch(), Stragglers())


class Incarnation:
    """One incarnation of the ranks on this node. Each start makes a new object, so nothing is reset.

    The main thread owns all attributes. Other threads may read ``pids``, which ``started`` replaces once, and call
    ``beats`` and ``seen``, which read the shared pages.
    """

    def __init__(
        self,
        pages: SharedPages,
        detectors: JobDetectors,
        clock: Callable[[], float] = time.monotonic,
        number: int = 0,
        meeting: str = "",
    ) -> None:
        """``number``: from 1; 0 stands for the time before the first start.

        ``meeting``: the name that all nodes give the incarnation; empty for one node.
        """
        self.number, self.meeting, self.began = number, meeting, clock()
        self.pids: Mapping[int, int] = {}
        """The process ids of the ranks, by rank; empty until they have started."""
        self.hung: tuple[int, ...] = ()
        """Ranks that delay the others."""
        self.is_over = number == 0
        """Whether the end of this incarnation is accounted for."""
        self._pages, self._detectors, self._clock = pages, detectors, clock
        self._watch = JobWatch(detectors.durations, self.began)
        self._observations: dict[int, RankObservation] = {}
        self._stacks: dict[int, str] = {}
        self._measured_at = self.began
        """When the ranks' busy times were read last."""

    def started(self, pids: Mapping[int, int]) -> None:
        """Record the process ids of the ranks that were started, by rank."""
        self.pids = dict(pids)
        processes = "1 process" if len(pids) == 1 else f"{len(pids)} processes"
        emit("run.started", f"incarnation {self.number}: {processes} started", life=self.number, ranks=len(pids))

    # -- the ranks' heartbeats

    def beats(self) -> dict[int, Heartbeat]:
        """Return the last heartbeat of each rank."""
        return {rank: beat for rank in self.pids if (beat := self._pages.beat(rank)) is not None}

    def seen(self) -> dict[int, tuple[int, Heartbeat]]:
        """Return the process id and the last heartbeat of each rank."""
        pids = self.pids
        return {rank: (pids[rank], beat) for rank, beat in self.beats().items() if rank in pids}

    def trained(self) -> list[Heartbeat]:
        """Return the heartbeats of all ranks once each has completed a step; an empty list before."""
        beats = list(self.beats().values())
        return beats if len(beats) >= len(self.pids) and all(beat.steps for beat in beats) else []

    @property
    def has_restored(self) -> bool:
        """Whether a rank has restored a checkpoint, or has begun without one."""
        return any(beat.restored != NOT_YET for beat in self.beats().values())

    @property
    def steps(self) -> int:
        """How many steps all ranks have completed, as observed last."""
        seen = self._observations.values()
        return min((rank.beat.steps if rank.beat is not None else 0 for rank in seen), default=0)

    @property
    def ahead_bytes(self) -> int:
        """The most memory, in bytes, of a rank at its ``relight.standby()``; 0 until all have called it."""
        sizes = [rank.beat.ahead if rank.beat is not None else 0 for rank in self._observations.values()]
        return max(sizes) if sizes and all(sizes) else 0

    def is_stored(self, reached: int) -> bool:
        """Return whether the last completed step is stored. ``reached``: the furthest step of all incarnations.

        A rank that was ended while it waited for its save may not know of the commit. In that case, read the run's log.
        """
        beats = self.beats().values()
        if reached > max((max(beat.step, beat.restored) for beat in beats), default=-1):
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

    # -- checks at each poll

    def observe(self) -> dict[int, RankObservation]:
        """Return each rank's heartbeat and process. If a page cannot be read, its last heartbeat counts."""
        observations = {}
        for rank, pid in self.pids.items():
            process = sample_process(pid)
            beat = self._pages.beat(rank) or self._observations.get(rank, RankObservation(None)).beat
            observations[rank] = RankObservation(beat, process.state, process.cpu_s, process.moved_bytes)
        self._observations = observations
        return observations

    def check(self, observations: Mapping[int, RankObservation]) -> str:
        """Check the ranks and their agents. Return why the job hangs; empty if it does not.

        Takes up to a second longer if a rank is late, because it takes stacks.
        """
        self._check_agents(observations)
        self._check_stragglers(observations)
        verdict = self._watch.update(self._clock(), observations)
        if verdict.what == "stacks":
            now, before = self._clock(), self.observe()
            self._stacks = stacks.take(self.pids, {rank: self._pages.stack_file(rank) for rank in self.pids})
            texts = {rank: stacks.of_main_thread(text) for rank, text in self._stacks.items()}
            verdict = self._watch.judge_stacks(now, before, texts, self.observe())
        if verdict.what != "hang":
            return ""
        self.hung = verdict.ranks
        emit("run.hang", f"hang: {verdict.why}", why=verdict.why, ranks=list(verdict.ranks))
        return verdict.why

    def with_evidence(self, workers: Iterable[Worker], *, hung: bool) -> tuple[Worker, ...]:
        """Return these ended workers with their heartbeats, process states and, if the job ``hung``, their stacks."""
        beats = self.beats()
        return tuple(
            replace(
                worker,
                beat=beats.get(worker.rank),
                state=worker.state or self._observations.get(worker.rank, RankObservation(None)).state,
                stacks=self._stacks.get(worker.rank, "") if hung else "",
            )
            for worker in workers
        )

    def _check_agents(self, observations: Mapping[int, RankObservation]) -> None:
        """Kill an agent that is stuck.

        Ranks that wait for it then write their saves themselves. The next save starts a new agent.
        """
        beats = [rank.beat for rank in observations.values() if rank.beat is not None]
        stuck = self._detectors.agents.update(self._clock(), beats, sample_agent)
        if stuck is not None:
            emit("agent.hung", f"{stuck.why}; it is killed, and the next save starts another agent", pid=stuck.pid)
            with contextlib.suppress(OSError):
                os.kill(stuck.pid, signal.SIGKILL)

    def _check_stragglers(self, observations: Mapping[int, RankObservation]) -> None:
        """Report a rank for which the others wait. Reads busy times once in ``STRAGGLERS_EVERY_S``."""
        now = self._clock()
        if now - self._measured_at < STRAGGLERS_EVERY_S or any(
            rank.beat is None or not rank.beat.steps for rank in observations.values()
        ):
            return
        self._measured_at = now
        busy = {rank: busy_s(self.pids[rank]) for rank, seen in observations.items() if seen.exists}
        slow = self._detectors.stragglers.update(now, busy)
        if slow is not None:
            share, others = percent_text(slow.share), percent_text(slow.others)
            text = f"the others wait for rank {slow.rank}: it works {share} of the time, they {others}"
            emit("run.straggler", text, rank=slow.rank, share=round(slow.share, 3), others=round(slow.others, 3))
