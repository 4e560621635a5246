"""Rehearsals: each breaks one thing of a job, and checks that the job reacts as docs/recovery.md describes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from relight.drill.orders import DrillOrder
from relight.drill.pace import Limit
from relight.drill.stage import CannotTry, DrillJob, Wrong
from relight.drill.target import DrillTarget
from relight.heartbeat import Heartbeat
from relight.supervise.incidents import Incident
from relight.supervise.procfs import sample_process
from relight.units import duration_text

SETTLED_STEPS = 3
"""Number of steps after which a script's job counts as resumed."""
AHEAD_S, AHEAD_STARTS = 0.5, 0.05
"""Seconds, and share of the slowest start, by which an order precedes its step, so that all ranks read it in time."""


class RehearsalResult(NamedTuple):
    """Result of a rehearsal that passed."""

    why: str
    noticed_s: float | None = None
    decided_s: float | None = None
    back_s: float | None = None
    steps_lost: int | None = None
    means: str = ""


@dataclass(frozen=True, slots=True)
class RehearsalStage:
    """Target, directories and deadline of a rehearsal."""

    target: DrillTarget
    folder: Path
    store: Path
    limit: Limit
    reference: Callable[[int], str]
    """Returns the hash of the built-in job's undisturbed end, without the samples of a step; -1 skips none."""

    def job(self) -> DrillJob:
        """Return a job on this machine; it is not started yet."""
        return DrillJob(self.target, self.folder, self.store, self.limit)


@dataclass(frozen=True, slots=True)
class Rehearsal:
    """A rehearsal. ``kind`` and ``action``: the classification and decision expected of relight run; empty if it must record nothing."""

    name: str
    what: str
    do: Callable[[RehearsalStage, Rehearsal], RehearsalResult]
    kind: str = ""
    action: str = ""


# -- a rank that fails ---------------------------------------------------------------------------------------------------------


def kill(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Send SIGKILL to the last rank."""
    with stage.job() as job:
        job.start()
        rank, beat = sorted(job.ready().items())[-1]
        broken = time.monotonic()
        job.send(beat.pid, signal.SIGKILL)
        return _continued(stage, job, rehearsal, rank, broken)


def hang(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Send SIGSTOP to the last rank: it exists, and does nothing."""
    with stage.job() as job:
        job.start()
        rank, beat = sorted(job.ready().items())[-1]
        broken = time.monotonic()
        job.send(beat.pid, signal.SIGSTOP)
        return _continued(stage, job, rehearsal, rank, broken)


def lock(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Make the last rank wait forever in Python."""
    return _run_rehearsal(stage, rehearsal, "lock")


def crash(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Make the last rank abort, as native code does on memory corruption."""
    return _run_rehearsal(stage, rehearsal, "crash")


def _run_rehearsal(stage: RehearsalStage, rehearsal: Rehearsal, what: str) -> RehearsalResult:
    with stage.job() as job:
        rank, _ = _arm(job, what)
        broken = job.wait(job.orders.done, "step at which the script executes the order")
        return _continued(stage, job, rehearsal, rank, broken)


def poison(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Make the loss of one step NaN, also when the step is repeated."""
    with stage.job() as job:
        _, step = _arm(job, "poison")
        broken = job.wait(job.orders.done, "step with a loss: ckpt.step(step, loss=loss)")
        incident = job.wait_for_recovery()
        settings = incident.settings
        if incident.action == rehearsal.action and (settings.get("RELIGHT_BEFORE"), settings.get("RELIGHT_SKIP")) != (
            str(step),
            f"{step}-{step}",
        ):
            raise Wrong(
                f"the job returned to before step {settings.get('RELIGHT_BEFORE')}, and the loss was NaN at step {step}"
            )
        try:
            return _continued(stage, job, rehearsal, None, broken, without=step)
        except Wrong:
            if sum(incident.kind == rehearsal.kind for incident in job.incidents()) > 1:
                what = f"the failure was repeated: the script ran step {step}, and must skip its samples"
                raise Wrong(f"{what}; does it call ckpt.should_skip(step)?") from None
            raise


def _arm(job: DrillJob, what: str) -> tuple[int, int]:
    """Start the job, and order its last rank to fail. Return that rank, and the step of the order."""
    if not job.target.can_be_ordered:
        raise CannotTry("a script that is not Python (--no-python) cannot be ordered to fail")
    job.start()
    rank, beat = sorted(job.ready().items())[-1]
    usual = (beat.step_at - beat.first_at) / max(1, beat.steps - 1)
    ahead_s = max(AHEAD_S, AHEAD_STARTS * job.limit.pace.start_s)
    step = max(beat.step for beat in job.beats().values()) + 2 + int(ahead_s / max(usual, 1e-3))
    job.orders.give(DrillOrder(what, step, rank))
    return rank, step


def _continued(
    stage: RehearsalStage, job: DrillJob, rehearsal: Rehearsal, rank: int | None, broken: float, *, without: int = -1
) -> RehearsalResult:
    """Check that the failure was detected, classified and recovered from, and that the end is that of an undisturbed run."""
    incident = job.wait_for_recovery()
    beats = job.beats()
    shown = judged(rehearsal, incident, beats, rank, broken)
    and_then = ended(stage, job, incidents=1, without=without)
    return shown._replace(why=f"{shown.why}{and_then}")


def judged(
    rehearsal: Rehearsal, incident: Incident, beats: dict[int, Heartbeat], rank: int | None, broken: float
) -> RehearsalResult:
    """Raise ``Wrong`` if an incident is not as expected. Pure."""
    after = incident.after
    assert after is not None
    if incident.kind != rehearsal.kind:
        raise Wrong(f"the failure was classified as {incident.kind}, and was {rehearsal.kind}: {incident.why}")
    if incident.action != rehearsal.action:
        raise Wrong(f"the action was {incident.action}, and should have been {rehearsal.action}: {incident.reason}")
    if rank is not None and incident.rank not in (rank, None):
        raise Wrong(f"the failure was assigned to rank {incident.rank}, and rank {rank} had failed: {incident.why}")
    durable = min((worker.get("durable", -1) for worker in incident.workers), default=-1)
    if rehearsal.action == "resume" and after.restored < durable:
        raise Wrong(f"step {durable} was stored, and training continued from step {after.restored}")
    stepped = max(beat.first_at for beat in beats.values())
    noticed = stepped - after.seconds["all"] + after.seconds["noticed"] - broken
    return RehearsalResult(
        f"{incident.why.splitlines()[0]} → {incident.action}, from step {after.restored}",
        noticed_s=round(noticed, 3),
        decided_s=round(noticed + after.seconds["decided"], 3),
        back_s=round(stepped - broken, 3),
        steps_lost=after.steps_lost,
    )


# -- what is around it ---------------------------------------------------------------------------------------------------------


def agent(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Send SIGKILL to the agent."""
    with stage.job() as job:
        job.start()
        job.ready()
        agents = job.agents()
        if not agents:
            raise CannotTry("the training processes write the saves themselves: there is no agent to kill")
        step, broken = job.step(), time.monotonic()
        for pid in agents:
            job.send(pid, signal.SIGKILL)
        saved = job.saves_again(step, "save after the agent's death")
        and_then = ended(stage, job, incidents=0)
        return RehearsalResult(
            f"training continued, and a save was stored {duration_text(saved - broken)} later{and_then}", steps_lost=0
        )


def supervisor(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Send SIGKILL to relight run. The drill, in place of a scheduler, starts it again when its ranks have ended."""
    with stage.job() as job:
        job.start()
        beats = job.ready()
        broken = time.monotonic()
        job.send(job.supervisor, signal.SIGKILL)
        job.wait(
            lambda: None if any(is_there(beat.pid) for beat in beats.values()) else True, "end of its ranks", over=True
        )
        last = max(beat.step for beat in job.beats().values())
        return _started_again(
            stage, job, last, broken, f"its ranks saved and ended {duration_text(time.monotonic() - broken)} later"
        )


def preempt(stage: RehearsalStage, rehearsal: Rehearsal) -> RehearsalResult:
    """Send SIGTERM to relight run, as a scheduler does; then start it again."""
    with stage.job() as job:
        job.start()
        job.ready()
        broken = time.monotonic()
        job.send(job.supervisor, signal.SIGTERM)
        code, took = job.has_ended(), time.monotonic() - broken
        last, stored = max(beat.step for beat in job.beats().values()), job.checkpoints()[-1].step
        if code not in (75, 76):
            raise Wrong(f"relight run ended with {code}, and not with 75 or 76")
        if (code == 75) != (stored >= last):
            raise Wrong(f"relight run ended with {code}, step {stored} is stored, and step {last} was the last")
        summary = f"it ended {duration_text(took)} later with {code}: step {last} was the last, {stored} is stored"
        return _started_again(stage, job, last, broken, summary)


def _started_again(stage: RehearsalStage, job: DrillJob, last: int, broken: float, summary: str) -> RehearsalResult:
    stored, before = job.checkpoints()[-1].step, len(job.incidents())
    job.start()
    beats = steps_again(job)
    restored = max(beat.restored for beat in beats.values())
    if restored < stored:
        raise Wrong(f"step {stored} is stored, and training continued from step {restored}")
    back = max(beat.first_at for beat in beats.values()) - broken
    and_then = ended(stage, job, incidents=before)
    return RehearsalResult(
        f"{summary}; after a restart, training continued from step {restored}{and_then}",
        back_s=round(back, 3),
        steps_lost=last - restored,
    )


def steps_again(job: DrillJob) -> dict[int, Heartbeat]:
    """Wait until all ranks of a restarted job have made a step. Return their heartbeats."""

    def stepping_beats() -> dict[int, Heartbeat] | None:
        beats = job.beats()
        return beats if beats and all(beat.steps for beat in beats.values()) else None

    beats = job.wait(stepping_beats, "step of the restarted job")
    job.makes_steps()
    return beats


def is_there(pid: int) -> bool:
    """Return whether a process still runs."""
    return sample_process(pid).state not in ("", "Z")


# -- the end -------------------------------------------------------------------------------------------------------------------


def ended(
    stage: RehearsalStage, job: DrillJob, *, incidents: int, without: int = -1, may_be_damaged: tuple[str, ...] = ()
) -> str:
    """Let the job end or make some steps, and check its results. Return a sentence about its final weights. Raise ``Wrong`` on a failure.

    ``incidents``: number of failures that relight run must have recorded. ``without``: a step with skipped samples.
    ``may_be_damaged``: ids of checkpoints that the rehearsal has damaged.
    """
    if stage.target.built_in:
        (stage.folder / "out.go").touch()
        code = job.has_ended()
        if code:
            raise Wrong(f"relight run ended with {code}: {job.last_words()}")
        if (stage.folder / "out.end").read_text(encoding="ascii") != stage.reference(without):
            raise Wrong("its final weights differ from those of an undisturbed run")
        same = "; the final weights equal those of an undisturbed run" + (
            f" without step {without}" if without >= 0 else ""
        )
    else:
        least = max(job.step(), without) + SETTLED_STEPS  # beyond a poisoned step, because it may fail again there
        job.wait(lambda: True if job.step() >= least or job.code == 0 else None, f"step {least}")
        same = ""
    incidents_seen = job.incidents()
    if len(incidents_seen) != incidents:
        more = [f"{incident.kind} at step {incident.step}" for incident in incidents_seen]
        raise Wrong(
            f"relight run recorded {len(incidents_seen)} failures, and there were {incidents}: {', '.join(more)}"
        )
    job.warden.sweep()
    wrong = {checkpoint_id: what for checkpoint_id, what in job.damage().items() if checkpoint_id not in may_be_damaged}
    if wrong:
        raise Wrong(f"relight verify: {next(iter(wrong.values()))}")
    return same
