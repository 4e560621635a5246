"""What is told of steps between two saves: a step a second, each ten seconds, and no device is waited for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.checkpointer import metric_feed
from relight.checkpointer.metric_feed import MetricFeed
from relight.observe import Event, subscribe


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Events of steps, and a clock of one's own."""
    now, heard = [0.0], list[Event]()
    monkeypatch.setattr(metric_feed, "monotonic", lambda: now[0])
    undo = subscribe(lambda event: heard.append(event) if event.name == "steps.done" else None)
    yield now, heard
    undo()


class Elsewhere:
    """A number on a device: to read it would wait."""

    ndim = 0
    device = torch.device("meta")

    def __float__(self) -> float:
        raise AssertionError("the device was waited for")


def test_a_step_a_second_told_each_ten_seconds(told: Any) -> None:
    """Of 250 steps in 25 seconds: 25 points in three events, the last when asked; the same number of values for each metric."""
    now, heard = told
    one = MetricFeed(True)
    for step in range(250):
        now[0] = step / 10
        metrics = {"loss": torch.tensor(step / 2), "far": Elsewhere(), "text": "x", "many": torch.ones(3)}
        one.add(step, {**metrics, "late": 1.0} if step > 55 else metrics)
    one.flush()
    one.flush()
    assert [len(event.fields["steps"]) for event in heard] == [11, 10, 4]
    steps = [step for event in heard for step in event.fields["steps"]]
    assert steps == list(range(0, 250, 10))
    assert [value for event in heard for value in event.fields["metrics"]["loss"]] == [step / 2 for step in steps]
    assert heard[0].fields["metrics"]["late"] == [None] * 6 + [1.0] * 5 and set(heard[1].fields["metrics"]) == {"loss", "late"}


def test_other_ranks_and_odd_metrics_tell_nothing(told: Any) -> None:
    """NaN is no point; a name without end, a metric too many are left out; a rank that does not tell keeps nothing."""
    now, heard = told
    silent, one = MetricFeed(False), MetricFeed(True)
    silent.add(1, {"loss": 1.0})
    silent.flush()
    one.add(1, {"loss": float("nan")})
    now[0] = 2.0
    one.add(2, {"x" * 81: 1.0, "loss": 10**400})
    one.flush()
    assert not heard
    now[0] = 4.0
    one.add(3, {f"m{number}": number for number in range(40)})
    one.flush()
    assert len(heard[0].fields["metrics"]) == metric_feed.METRICS_MAX


def test_a_run_that_ends_has_told_all(told: Any, tmp_path: Path) -> None:
    """What was not told yet is told at the end, whatever the run's length."""
    _, heard = told
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "runs" / "demo", save=None, model=model, signals=False) as ckpt:
        ckpt.step(0, loss=2.5)
    assert [(event.fields["steps"], event.fields["metrics"]) for event in heard] == [([0], {"loss": [2.5]})]
