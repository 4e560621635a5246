"""Rehearsals on a real running job: only failures that it must survive, and only if they were named."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from relight.catalog.run import Run
from relight.drill.made_of import MadeOf, of_script
from relight.drill.pace import Limit, Pace
from relight.drill.pages import Pages, running
from relight.drill.processes import is_below
from relight.drill.programme import REHEARSALS
from relight.drill.rehearsals import SETTLED_STEPS, Rehearsal, RehearsalResult, is_there, judged
from relight.drill.stage import POLL_INTERVAL_S, CannotTry, Wrong
from relight.errors import CheckpointNotFound, ConfigError
from relight.heartbeat import Heartbeat
from relight.supervise.incidents import Incident, read_incidents
from relight.supervise.procfs import began_at
from relight.units import duration_text

T = TypeVar("T")
MAY = ("kill", "hang", "preempt")
"""Rehearsals that are allowed on a running job. Each is a failure that a job must expect."""


class LiveJob:
    """A job that runs on this machine under ``relight run``. The drill did not start it, and does not end it."""

    def __init__(self, run: Run) -> None:
        self._run = run
        url = f"{run.store.url.rstrip('/')}/{run.name}"
        jobs = running(url)
        if not jobs:
            hint = "run the drill on a machine that has ranks of the job, as the same user"
            raise CheckpointNotFound("no job of this run is running here under relight run", where=url, hint=hint)
        if len(jobs) > 1:
            raise ConfigError(f"{len(jobs)} jobs on this machine train this run", where=url)
        self._supervisor = jobs[0].supervisor
        self._pages = Pages(self._supervisor)

    def close(self) -> None:
        """Stop monitoring the job."""
        self._pages.close()

    def made_of(self) -> MadeOf:
        """Return the job's script and settings. The newest checkpoint records the script and its arguments."""
        folder = Path.cwd()
        with contextlib.suppress(OSError):
            folder = Path(os.readlink(f"/proc/{self._supervisor}/cwd"))
        newest = self._run.history().live[-1:]
        argv = self._run.open(newest[0]).root.environment.get("argv") if newest else None
        return of_script([str(argument) for argument in argv] if isinstance(argv, list) else [], folder)

    def pace(self, timeout_s: float | None) -> Pace:
        """Return the pace of this job, from its earlier restarts, or from the time between its processes' start and first step."""
        pace = Pace(timeout_s)
        known = [
            incident.after.seconds.get("all", 0.0)
            for incident in read_incidents(self._run.store, self._run.name)
            if incident.after is not None
        ]
        beats = self._pages.beats().values()
        first = [beat.first_at - began for beat in beats if beat.steps and (began := began_at(beat.pid)) is not None]
        pace.started(max(known or first, default=POLL_INTERVAL_S))
        return pace

    def do(self, rehearsal: Rehearsal, limit: Limit) -> RehearsalResult:
        """Run one rehearsal on the job."""
        rank, beat = sorted(self._wait_until_stable(limit).items())[-1]
        if rehearsal.name == "preempt":
            return self._end_it(limit)
        before = {incident.id for incident in read_incidents(self._run.store, self._run.name)}
        broken = time.monotonic()
        os.kill(beat.pid, signal.SIGKILL if rehearsal.name == "kill" else signal.SIGSTOP)
        try:
            incident = _wait(lambda: self._finished_incident(before), "step after the failure", limit)
        finally:
            if rehearsal.name == "hang" and is_below(beat.pid, self._supervisor):  # it was not detected as hanging
                with contextlib.suppress(ProcessLookupError):
                    os.kill(beat.pid, signal.SIGCONT)
        shown = judged(rehearsal, incident, self._pages.beats(), rank, broken)
        self._wait_until_stable(limit)
        return shown

    def _wait_until_stable(self, limit: Limit) -> dict[int, Heartbeat]:
        def settled_beats() -> dict[int, Heartbeat] | None:
            beats = {rank: beat for rank, beat in self._pages.beats().items() if is_below(beat.pid, self._supervisor)}
            settled = all(
                beat.steps >= SETTLED_STEPS and max(beat.durable, beat.restored) >= 0 for beat in beats.values()
            )
            return beats if beats and settled else None

        return _wait(settled_beats, "steps after a checkpoint", limit)

    def _finished_incident(self, before: set[str]) -> Incident | None:
        if not is_there(self._supervisor):
            raise Wrong("relight run has ended: relight incidents shows the reason")
        incidents = [
            incident for incident in read_incidents(self._run.store, self._run.name) if incident.id not in before
        ]
        return next(
            (
                incident
                for incident in incidents
                if incident.after is not None and incident.host == socket.gethostname()
            ),
            None,
        )

    def _end_it(self, limit: Limit) -> RehearsalResult:
        broken = time.monotonic()
        os.kill(self._supervisor, signal.SIGTERM)
        _wait(lambda: None if is_there(self._supervisor) else True, "end of relight run", limit)
        took = time.monotonic() - broken
        last, live = max(beat.step for beat in self._pages.beats().values()), self._run.history().live
        stored = live[-1].step if live else -1
        if stored < 0:
            raise Wrong(f"the job ended {duration_text(took)} later, and nothing is stored")
        why = f"the job ended {duration_text(took)} later: step {last} was the last, {stored} is stored"
        why += "; the next start continues from there"
        return RehearsalResult(why, steps_lost=max(0, last - stored))


def rehearsals_of(names: list[str]) -> list[Rehearsal]:
    """Return the named rehearsals; a kill if none is named."""
    for name in names:
        if name not in MAY:
            raise ConfigError(
                f"{name!r} is not allowed on a running job",
                hint=f"use {', '.join(MAY)}; or drill a copy, without --live",
            )
    return [REHEARSALS[name] for name in MAY if name in (names or ["kill"])]


def _wait(until: Callable[[], T | None], what: str, limit: Limit) -> T:
    while True:
        result = until()
        if result is not None:
            return result
        if time.monotonic() > limit.ends:
            if limit.cut_short:
                raise CannotTry(f"the drill's deadline (--deadline) passed while waiting for: {what}")
            raise Wrong(f"timed out while waiting for: {what}")
        time.sleep(POLL_INTERVAL_S)
