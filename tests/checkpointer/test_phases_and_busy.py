"""``adaptive(phases=, busy=)``: the interval by the phase of training, and by what disk and device do besides."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer import adaptive_schedule, checkpointer, resource_use
from relight.checkpointer.resource_use import SAMPLE_S, ResourceUse
from relight.cost_model import ScheduleDecision
from relight.errors import ConfigError
from relight.observe import Event, subscribe


class Clock:
    """Seconds that a test counts."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture(name="clock")
def clock_fixture(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The loop's clock, and an interval of 10 seconds, whatever saves cost."""
    clock = Clock()
    monkeypatch.setattr(checkpointer, "monotonic", clock)
    monkeypatch.setattr(adaptive_schedule.AdaptiveSchedule.__init__, "__defaults__", (clock, None))
    numbers = {"wanted_s": 10.0, "foreseen": 0.0, "guesses": 0.0}
    monkeypatch.setattr(adaptive_schedule, "decide", lambda seen, before, bounds: ScheduleDecision(10.0, 1, "decided", numbers))
    return clock


@pytest.fixture(name="events")
def events_fixture() -> Iterator[list[Event]]:
    """The events of one test."""
    found: list[Event] = []
    undo = subscribe(found.append)
    yield found
    undo()


def train(ckpt: relight.Checkpointer, clock: Clock, steps: range) -> list[int]:
    """A second a step. The steps that were saved."""
    found = []
    for step in steps:
        clock.now += 1
        if ckpt.step(step) is not None:
            found.append(step)
    return found


def test_each_phase_has_its_interval(tmp_path: Path, clock: Clock, events: list[Event]) -> None:
    """Four times as long in the warm-up, half as long where steps are dear; each change is told with its reason."""
    rules = relight.adaptive(phases={"warm-up": 4, "reinforcement": 0.5})
    with relight.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False) as ckpt:
        ckpt.restore()
        ckpt.phase = "warm-up"
        first = train(ckpt, clock, range(100))
        ckpt.phase = ""
        second = train(ckpt, clock, range(100, 200))
        ckpt.phase = "reinforcement"
        third = train(ckpt, clock, range(200, 300))
        assert ckpt.phase == "reinforcement"
        with pytest.raises(ConfigError, match="has no 'warmup'"):
            ckpt.phase = "warmup"
        with pytest.raises(ConfigError, match="is a name"):
            ckpt.phase = 3  # type: ignore[assignment]
    assert [len(first), len(second), len(third)] == [2, 10, 20]
    said = [str(one.fields["reason"]) for one in events if one.name == "schedule.changed"]
    assert any(one.startswith("every 40 s: phase 'warm-up': 4 times the interval") for one in said)
    assert any(one.startswith("every 5 s: phase 'reinforcement'") for one in said)


def test_a_phase_stays_within_the_bounds(tmp_path: Path, clock: Clock) -> None:
    """``at_least`` and ``at_most`` hold in every phase."""
    rules = relight.adaptive(at_least=8, at_most=20, phases={"slow": 100, "fast": 0.01})
    with relight.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False) as ckpt:
        ckpt.restore()
        ckpt.phase = "slow"
        slow = train(ckpt, clock, range(100))
        ckpt.phase = "fast"
        assert (len(slow), len(train(ckpt, clock, range(100, 180)))) == (5, 10)


@pytest.mark.parametrize(("share", "saves"), [(1.0, 6), (0.1, 10)])
def test_a_busy_disk_has_saves_come_later(
    tmp_path: Path, clock: Clock, monkeypatch: pytest.MonkeyPatch, events: list[Event], share: float, saves: int
) -> None:
    """Twice the interval while something else keeps the disk busy, from the second sample on; as ever if it is idle."""
    monkeypatch.setattr(resource_use, "_stat_file", lambda root: Path("/stat"))
    monkeypatch.setattr(resource_use, "_busy_s", lambda path: share * clock.now)
    rules = relight.adaptive(busy={"disk": 0.8})
    with relight.Checkpointer(tmp_path / "run", model=torch.nn.Linear(2, 2), save=rules, signals=False, background=False) as ckpt:
        ckpt.restore()
        found = train(ckpt, clock, range(100))
    assert abs(len(found) - saves) <= 1
    told = [one for one in events if one.name == "schedule.changed" and "disk 100% in use" in str(one.fields["reason"])]
    assert len(told) == (1 if share == 1.0 else 0), "once, not at each sample"


def test_a_save_of_ones_own_does_not_count_as_busy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Samples with a save in between are left out; the kernel's counters are read where there are any."""
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


def test_what_is_no_phase_and_no_resource_is_refused() -> None:
    """When the trigger is made."""
    for wrong in ({"phases": {"a": 0}}, {"phases": ["a"]}, {"busy": {"disk": 2}}, {"busy": {"network": 0.5}}, {"busy": 0.5}):
        with pytest.raises(ConfigError, match="phases|busy"):
            relight.adaptive(**wrong)  # type: ignore[arg-type]
