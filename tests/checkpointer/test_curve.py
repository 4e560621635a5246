"""Metrics of steps between two saves: each step up to a limit, one event every ten seconds, and no device is synchronised."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import metric_feed
from relight.checkpointer.metric_feed import MetricFeed
from relight.observe import Event, subscribe
from relight.observe.file import LINE_BYTES_MAX


@pytest.fixture
def feed(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a clock that the test sets, and the received events of steps."""
    now, events = [0.0], list[Event]()
    monkeypatch.setattr(metric_feed, "monotonic", lambda: now[0])
    undo = subscribe(lambda event: events.append(event) if event.name == "steps.done" else None)
    yield now, events
    undo()


class Elsewhere:
    """A number on a device. Reading it would synchronise the device."""

    ndim = 0
    device = torch.device("meta")

    def __float__(self) -> float:
        raise AssertionError("the device was synchronised")


def test_steps_are_reported_in_groups(feed: Any) -> None:
    """Report all 250 steps of 25 seconds, with their ages. Each metric has the same number of values."""
    now, events = feed
    meter = MetricFeed(True)
    for step in range(250):
        now[0] = step / 10
        metrics = {"loss": torch.tensor(step / 2), "far": Elsewhere(), "text": "x", "many": torch.ones(3)}
        meter.add(step, {**metrics, "late": 1.0} if step > 55 else metrics)
    meter.flush()
    meter.flush()
    assert [len(event.fields["steps"]) for event in events] == [101, 100, 49]
    steps = [step for event in events for step in event.fields["steps"]]
    assert steps == list(range(250))
    assert [value for event in events for value in event.fields["metrics"]["loss"]] == [step / 2 for step in steps]
    assert events[0].fields["metrics"]["late"] == [None] * 56 + [1.0] * 45
    assert set(events[1].fields["metrics"]) == {"loss", "late"}
    assert events[0].fields["ages"] == [round(10 - step / 10, 2) for step in range(101)]


def test_a_long_run_reports_fewer_steps_and_short_lines(feed: Any) -> None:
    """The first 10,000 steps are all reported, later ones at growing distances. Each event fits into a line of the event file."""
    now, events = feed
    meter = MetricFeed(True)
    for step in range(100_000):
        now[0] = step / 10_000
        meter.add(step, {f"metric {number}": -1.2345678901234567e-100 for number in range(12)})
    meter.flush()
    steps = [step for event in events for step in event.fields["steps"]]
    assert steps[:9_999] == list(range(9_999)) and steps[-1] > 99_980
    assert 25_000 < len(steps) < 35_000 and max(later - earlier for earlier, later in pairwise(steps)) <= 11
    assert max(len(json.dumps(event.fields)) for event in events) < LINE_BYTES_MAX - 500


def test_slow_steps_are_all_reported(feed: Any) -> None:
    """A step that takes a second is reported even after many steps."""
    now, events = feed
    meter = MetricFeed(True)
    for step in range(30_000):
        now[0] = float(step)
        meter.add(step, {"loss": 1.0})
    meter.flush()
    assert [step for event in events for step in event.fields["steps"]] == list(range(30_000))


def test_other_ranks_and_invalid_metrics_are_not_reported(feed: Any) -> None:
    """Leave out NaN, names that are too long, and metrics above the limit. A rank that does not report keeps nothing."""
    now, events = feed
    silent, meter = MetricFeed(False), MetricFeed(True)
    silent.add(1, {"loss": 1.0})
    silent.flush()
    meter.add(1, {"loss": float("nan")})
    now[0] = 2.0
    meter.add(2, {"x" * 81: 1.0, "loss": 10**400})
    meter.flush()
    assert not events
    now[0] = 4.0
    meter.add(3, {f"m{number}": number for number in range(40)})
    meter.flush()
    assert len(events[0].fields["metrics"]) == metric_feed.METRICS_MAX


def test_the_end_of_a_run_reports_the_last_steps(feed: Any, tmp_path: Path) -> None:
    """Report the last steps at the run's end, whatever its length."""
    _, events = feed
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "runs" / "demo", save=None, model=model, signals=False) as ckpt:
        ckpt.step(0, loss=2.5)
    assert [(event.fields["steps"], event.fields["metrics"]) for event in events] == [([0], {"loss": [2.5]})]
