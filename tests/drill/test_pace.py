"""Rehearsals on a slow machine: bounds follow the job's times, a hanging job still fails, and the drill's deadline fails nothing."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import pytest

from relight.drill import DrillOptions, RehearsalOutcome, drive, live, pace, rehearsals, run, stage, storage
from relight.drill.pace import LEAST_S, REHEARSALS, STARTS, Limit, Pace
from relight.drill.report import FAILED, PASSED, SKIPPED
from relight.heartbeat import Heartbeat

START_S, STEP_S, END_S = 8.0, 0.1, 4.0
"""Seconds of a start, a step and an end of the job on an idle machine."""


class Machine:
    """A machine with a simulated clock, which advances during waits, and a factor by which everything is slower."""

    def __init__(self) -> None:
        self.now, self.slow = 1000.0, 1.0
        self.hangs_at_start = math.inf

    def monotonic(self) -> float:
        """Return the time of the simulated clock."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Advance the clock by at least half a second, so that simulated hours take little real time."""
        self.now += max(seconds, 0.5)


class FakeJob(stage.DrillJob):
    """A simulated job that starts, steps and saves at its machine's speed. No process is started."""

    machine: Machine

    def __init__(self, target: Any, folder: Path, store: Path, limit: Limit, prefix: Any = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.target, self.folder, self.store, self.limit = target, folder, store, limit
        self.warden = SimpleNamespace(sweep=lambda: None, close=lambda: None)  # type: ignore[assignment]
        self.starts, self.started, self.first = 0, self.machine.now, 0

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        return None

    def start(self, *flags: str, env: Any = None, without: int = -1) -> None:
        self.starts += 1
        self.first = 10 if self.starts > 1 else 0
        self.started = self._started_at = self.machine.now

    def _steps(self) -> int:
        """Return the number of steps since the start."""
        if self.starts > self.machine.hangs_at_start:
            return 0
        return max(
            0, int((self.machine.now - self.started - START_S * self.machine.slow) / (STEP_S * self.machine.slow))
        )

    @property
    def code(self) -> int | None:
        """Exit code 0 some time after the job may end, if it makes steps; else None."""
        may = (self.folder / "out.go").exists() and self._steps() > 0
        if not may or self.machine.now < self.started + (START_S + END_S) * self.machine.slow:
            return None
        (self.folder / "out.end").write_text("as it should", encoding="ascii")
        return 0

    def beats(self) -> dict[int, Heartbeat]:
        steps = self._steps()
        return {
            0: Heartbeat(
                steps=steps,
                step=self.first + steps,
                durable=(self.first + steps) // 10 * 10,
                restored=self.first,
                first_at=self.machine.now,
            )
        }

    def checkpoints(self) -> list[Any]:
        steps = [step for step in (10, 20) if self.beats()[0].step >= step] if self.starts == 1 else [10, 20]
        return [SimpleNamespace(id=f"c{step}", step=step) for step in steps]

    def damage(self) -> dict[str, str]:
        return {"c20": "damaged"} if self.spoiled else {}

    spoiled = False

    def incidents(self) -> list[Any]:
        return []

    def output(self) -> str:
        return "" if self.starts < 2 else "checkpoint c20 (step 20) is skipped"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """Replace the drill's clocks and jobs by simulated ones."""
    made = Machine()
    clock = SimpleNamespace(monotonic=made.monotonic, sleep=made.sleep, time=lambda: 1.0)
    for module in (stage, pace, drive, storage, rehearsals, live):
        monkeypatch.setattr(module, "time", clock)
    job = type("Here", (FakeJob,), {"machine": made})
    for module in (drive, rehearsals):
        monkeypatch.setattr(module, "DrillJob", job)

    @contextlib.contextmanager
    def spoiled(job: FakeJob, checkpoint: Any) -> Iterator[str]:
        job.spoiled = True
        yield "a file"

    monkeypatch.setattr(storage, "spoiled", spoiled)
    monkeypatch.setattr(drive, "made_of", lambda target: None)
    return made


def damaged(machine: Machine, **options: Any) -> RehearsalOutcome:
    """Return the outcome of the rehearsal ``damage``."""
    return run(DrillOptions(only=["damage"], **options)).outcomes[0]


@pytest.mark.parametrize("slow", [1, 10, 20, 60])
def test_a_job_that_comes_back_passes_however_slow_the_machine_is(machine: Machine, slow: float) -> None:
    """The bound follows the first start. At a factor of 60, a start takes eight minutes, and the rehearsal half an hour."""
    machine.slow = slow
    outcome = damaged(machine)
    assert outcome.verdict == PASSED, outcome.why
    assert (outcome.took_s > LEAST_S) == (slow >= 10)
    with_a_constant = damaged(machine, timeout_s=300.0)
    assert (with_a_constant.verdict == FAILED) == (slow >= 20), "what was the bound once, whatever the machine"


def test_a_job_that_does_not_come_back_fails(machine: Machine) -> None:
    """A job that hangs fails at the least bound; on a slow machine at a multiple of its start; with --timeout at that time."""
    machine.hangs_at_start = 1
    outcome = damaged(machine)
    assert outcome.verdict == FAILED and "no step of the restarted job" in outcome.why and outcome.took_s < LEAST_S + 5
    machine.slow = 5
    outcome = damaged(machine)
    assert outcome.verdict == FAILED and LEAST_S < outcome.took_s < STARTS * 5 * (START_S + 3) + 60
    outcome = damaged(machine, timeout_s=120.0)
    assert outcome.verdict == FAILED and outcome.took_s < 125


def test_load_that_comes_later_is_measured_too(machine: Machine) -> None:
    """A slow start, and a slow rehearsal that passed, extend the bound of later rehearsals."""
    measured = Pace()
    assert math.isinf(measured.bound_s) and not measured.measured
    measured.started(2.0)
    assert measured.bound_s == LEAST_S
    measured.started(100.0)
    measured.started(3.0)
    assert measured.bound_s == STARTS * 100
    measured.passed(1000.0)
    assert measured.bound_s == REHEARSALS * 1000
    assert Pace(60.0).bound_s == 60


def test_the_drill_s_own_end_fails_nothing(machine: Machine) -> None:
    """A rehearsal that the deadline cuts short is skipped; a job that never makes a step fails."""
    machine.slow = 20
    outcome = damaged(machine, deadline_s=250.0)
    assert outcome.verdict == SKIPPED and "--deadline" in outcome.why
    machine.hangs_at_start = 0
    outcome = damaged(machine, deadline_s=600.0)
    assert outcome.verdict == FAILED and "no steps after a checkpoint within" in outcome.why


def test_the_undisturbed_run_has_the_same_time(machine: Machine, tmp_path: Path) -> None:
    """The undisturbed run has the same bound, because a slow machine may need minutes for the start."""
    machine.slow = 30
    measured = Pace()
    measured.started(START_S * machine.slow)
    made: Callable[[int], str] = drive.References(DrillOptions().target, tmp_path, measured)
    assert made(-1) == "as it should" and machine.now > 1000 + 240
