"""Rehearsals on a slow machine: bounds follow what the job takes there; what hangs still fails; the drill's own end fails nothing."""

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
"""Of the job, on a machine that does nothing else."""


class Machine:
    """A clock that moves when somebody waits, and how many times as slow as usual everything is."""

    def __init__(self) -> None:
        self.now, self.slow = 1000.0, 1.0
        self.hangs_at_start = math.inf

    def monotonic(self) -> float:
        """Its clock."""
        return self.now

    def sleep(self, seconds: float) -> None:
        """Time passes: at least half a second, so that a test of an hour takes a moment."""
        self.now += max(seconds, 0.5)


class FakeJob(stage.DrillJob):
    """A job that starts, steps and saves as slowly as its machine says. Nothing is started."""

    machine: Machine

    def __init__(self, target: Any, folder: Path, store: Path, limit: Limit, prefix: Any = ()) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.target, self.folder, self.store, self.limit = target, folder, store, limit
        self.warden = SimpleNamespace(sweep=lambda: None, close=lambda: None)  # type: ignore[assignment]
        self.starts, self.started, self.first = 0, self.machine.now, 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def start(self, *flags: str, env: Any = None, without: int = -1) -> None:
        self.starts += 1
        self.first = 10 if self.starts > 1 else 0
        self.started = self._started_at = self.machine.now

    def _steps(self) -> int:
        """Made since the start."""
        if self.starts > self.machine.hangs_at_start:
            return 0
        return max(0, int((self.machine.now - self.started - START_S * self.machine.slow) / (STEP_S * self.machine.slow)))

    @property
    def code(self) -> int | None:
        """It ends some time after it may, if it makes steps at all."""
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
        at = [step for step in (10, 20) if self.beats()[0].step >= step] if self.starts == 1 else [10, 20]
        return [SimpleNamespace(id=f"c{step}", step=step) for step in at]

    def damage(self) -> dict[str, str]:
        return {"c20": "damaged"} if self.spoiled else {}

    spoiled = False

    def incidents(self) -> list[Any]:
        return []

    def said(self) -> str:
        return "" if self.starts < 2 else "checkpoint c20 (step 20) is passed over"


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """All of the drill's clocks are its clock, all jobs are its jobs."""
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
    """The verdict of the one rehearsal."""
    return run(DrillOptions(only=["damage"], **options)).outcomes[0]


@pytest.mark.parametrize("slow", [1, 10, 20, 60])
def test_a_job_that_comes_back_passes_however_slow_the_machine_is(machine: Machine, slow: float) -> None:
    """Its first start is the measure: at 60 times, one start takes eight minutes, and the whole rehearsal half an hour."""
    machine.slow = slow
    found = damaged(machine)
    assert found.verdict == PASSED, found.why
    assert (found.took_s > LEAST_S) == (slow >= 10)
    with_a_constant = damaged(machine, timeout_s=300.0)
    assert (with_a_constant.verdict == FAILED) == (slow >= 20), "what was the bound once, whatever the machine"


def test_a_job_that_does_not_come_back_fails(machine: Machine) -> None:
    """On a usual machine after the least bound, on a slow one after so many times its start; with --timeout after that."""
    machine.hangs_at_start = 1
    found = damaged(machine)
    assert found.verdict == FAILED and "no step of the job that was started again" in found.why and found.took_s < LEAST_S + 5
    machine.slow = 5
    found = damaged(machine)
    assert found.verdict == FAILED and LEAST_S < found.took_s < STARTS * 5 * (START_S + 3) + 60
    found = damaged(machine, timeout_s=120.0)
    assert found.verdict == FAILED and found.took_s < 125


def test_load_that_comes_later_is_measured_too(machine: Machine) -> None:
    """A slow start of one rehearsal is a measure for those behind it, and so is a whole one that passed."""
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
    """A rehearsal that it cuts short shows nothing, and is skipped; a job that never made a step failed."""
    machine.slow = 20
    found = damaged(machine, deadline_s=250.0)
    assert found.verdict == SKIPPED and "--deadline" in found.why
    machine.hangs_at_start = 0
    found = damaged(machine, deadline_s=600.0)
    assert found.verdict == FAILED and "no steps with a checkpoint behind them within" in found.why


def test_the_undisturbed_run_has_the_same_time(machine: Machine, tmp_path: Path) -> None:
    """It had two minutes, of which a slow machine needs more for its start alone."""
    machine.slow = 30
    measured = Pace()
    measured.started(START_S * machine.slow)
    made: Callable[[int], str] = drive.References(DrillOptions().target, tmp_path, measured)
    assert made(-1) == "as it should" and machine.now > 1000 + 240
