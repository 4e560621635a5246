"""``adaptive(phases=, busy=)``: the interval by the phase of training, and by other use of disk and device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer import adaptive_schedule, resource_use, restorer, run_progress, save_loop
from relight.checkpointer.resource_use import SAMPLE_S, ResourceUse
from relight.cost_model import ScheduleDecision
from relight.errors import ConfigError
from relight.observe import Event, subscribe


class Clock:
    """A clock that the test sets, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def clock_fixture(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Replace the loop's clock, and set an interval of 10 seconds whatever saves cost."""
    clock = Clock()
    for module in (save_loop, restorer, run_progress):
        monkeypatch.setattr(module, "monotonic", clock)
    monkeypatch.setattr(adaptive_schedule.AdaptiveSchedule.__init__, "__defaults__", (clock, None))
    numbers = {"wanted_s": 10.0, "foreseen": 0.0, "guesses": 0.0}
    monkeypatch.setattr(
        adaptive_schedule, "decide", lambda seen, before, bounds: ScheduleDecision(10.0, 1, "decided", numbers)
    )
    return clock


@pytest.fixture(name="events")
def events_fixture() -> Iterator[list[Event]]:
    """Return the events of one test."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()


def train(ckpt: relight.Checkpointer, clock: Clock, steps: range) -> list[int]:
    """Train one step a second. Return the saved steps."""
    saved = []
    for step in steps:
        clock.now += 1
        if ckpt.step(step) is not None:
            saved.append(step)
    return saved


def test_each_phase_has_its_interval(tmp_path: Path, clock: Clock, events: list[Event]) -> None:
    """Multiply the interval by four in the warm-up, and halve it in an expensive phase. Each change is reported with
    its reason."""
    rules = relight.adaptive(phases={"warm-up": 4, "reinforcement": 0.5})
    with relight.Checkpointer(
        tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False
    ) as ckpt:
        ckpt.restore()
        ckpt.phase = "warm-up"
        first = train(ckpt, clock, range(100))
        ckpt.phase = ""
        second = train(ckpt, clock, range(100, 200))
        ckpt.phase = "reinforcement"
        third = train(ckpt, clock, range(200, 300))
        assert ckpt.phase == "reinforcement"
        with pytest.raises(ConfigError, match="has no phase 'warmup'"):
            ckpt.phase = "warmup"
        with pytest.raises(ConfigError, match="must be a name"):
            ckpt.phase = 3  # type: ignore[assignment]
    assert [len(first), len(second), len(third)] == [2, 10, 20]
    reasons = [str(event.fields["reason"]) for event in events if event.name == "schedule.changed"]
    assert any(reason.startswith("every 40 s: phase 'warm-up': 4 times the interval") for reason in reasons)
    assert any(reason.startswith("every 5 s: phase 'reinforcement'") for reason in reasons)


def test_a_phase_stays_within_the_bounds(tmp_path: Path, clock: Clock) -> None:
    """Apply ``at_least`` and ``at_most`` in every phase."""
    rules = relight.adaptive(at_least=8, at_most=20, phases={"slow": 100, "fast": 0.01})
    with relight.Checkpointer(
        tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False
    ) as ckpt:
        ckpt.restore()
        ckpt.phase = "slow"
        slow = train(ckpt, clock, range(100))
        ckpt.phase = "fast"
        assert (len(slow), len(train(ckpt, clock, range(100, 180)))) == (5, 10)


@pytest.mark.parametrize(("share", "saves"), [(1.0, 6), (0.1, 10)])
def test_a_busy_disk_has_saves_come_later(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, events: list[Event], share: float, saves: int
) -> None:
    """Double the interval while another process keeps the disk busy, from the second sample on. An idle disk changes
    nothing."""
    monkeypatch.setattr(resource_use, "_stat_file", lambda root: Path("/stat"))
    monkeypatch.setattr(resource_use, "_busy_s", lambda path: share * clock.now)
    rules = relight.adaptive(busy={"disk": 0.8})
    with relight.Checkpointer(
        tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False
    ) as ckpt:
        ckpt.restore()
        saved = train(ckpt, clock, range(100))
    assert abs(len(saved) - saves) <= 1
    changes = [
        event
        for event in events
        if event.name == "schedule.changed" and "disk 100 % in use" in str(event.fields["reason"])
    ]
    assert len(changes) == (1 if share == 1.0 else 0), "once, not at each sample"


def test_a_save_of_ones_own_does_not_count_as_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Ignore samples with a save in between. Read the kernel's counters where they exist."""
    clock = Clock()
    monkeypatch.setattr(resource_use, "_stat_file", lambda root: Path("/stat"))
    monkeypatch.setattr(resource_use, "_busy_s", lambda path: clock.now)
    use = ResourceUse("/", clock)
    for turn in range(6):
        clock.now += SAMPLE_S
        use.sample(writing=turn % 2 == 1)
    assert use.shares.get("disk") is None
    clock.now += SAMPLE_S
    assert use.sample(writing=False) and not use.sample(writing=False)
    clock.now += SAMPLE_S
    use.sample(writing=False)
    assert use.shares["disk"] == 1.0
    monkeypatch.undo()
    assert ResourceUse("s3://bucket/x", clock).sample(writing=False)
    assert ResourceUse(str(tmp_path), clock).sample(writing=False)


def test_an_invalid_phase_or_resource_is_refused() -> None:
    """Refuse invalid phases and resources when the trigger is made."""
    for wrong in (
        {"phases": {"a": 0}},
        {"phases": ["a"]},
        {"busy": {"disk": 2}},
        {"busy": {"network": 0.5}},
        {"busy": 0.5},
    ):
        with pytest.raises(ConfigError, match="phases|busy"):
            relight.adaptive(**wrong)  # type: ignore[arg-type]
