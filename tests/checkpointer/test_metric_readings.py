"""Unreadable metrics make no save fail. They are omitted with a warning."""

from __future__ import annotations

import decimal
import fractions
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.scripts import run_script

import relight
from relight.checkpointer import metric_values
from relight.errors import ConfigError
from relight.observe import Event, subscribe

SCRIPT = """
import os, signal, sys
import numpy, torch, relight
with relight.Checkpointer(sys.argv[1], model=torch.nn.Linear(2, 2), save=relight.every(steps=1000), background=False) as ckpt:
    for step in range(ckpt.restore(), 50):
        if step == 20:
            signal.raise_signal(signal.SIGTERM)
        ckpt.step(step, loss=numpy.array([0.5]))
"""


class Late:
    """A metric that passes every check and cannot be read."""

    def __float__(self) -> float:
        raise RuntimeError("no value yet")


@pytest.fixture
def events() -> Iterator[list[Event]]:
    metric_values._reported.clear()
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()


def saved(path: Path) -> dict[str, Any]:
    return dict(relight.open(path).checkpoints()[-1].body.metrics)


def test_the_save_of_a_preempted_job_survives_its_metric(tmp_path: Path) -> None:
    """An array of one element is a number: the save on SIGTERM, the only one, must not fail for it."""
    run = tmp_path / "store" / "run"
    process = run_script(SCRIPT, str(run), timeout_s=120)
    assert process.returncode == -signal.SIGTERM, process.stderr
    assert [checkpoint.step for checkpoint in relight.open(run).checkpoints()] == [20] and saved(run) == {"loss": 0.5}


@pytest.mark.parametrize(
    "value", [np.array([0.5]), np.array([[0.5]]), np.array(0.5), torch.tensor([[0.5]]), np.float16(0.5)]
)
def test_anything_of_one_element_is_read(tmp_path: Path, value: Any) -> None:
    """Shapes and types of one number are read alike, by a save and by a trigger."""
    with relight.Checkpointer(
        tmp_path / "run", x=torch.zeros(2), save=relight.best("acc"), background=False, signals=False
    ) as ckpt:
        ckpt.restore()
        assert ckpt.step(0, acc=value) is not None
        assert ckpt.step(1, acc=value) is None
    assert relight.open(tmp_path / "run").checkpoints()[0].body.metrics == {"acc": 0.5}


@pytest.mark.parametrize("value", [decimal.Decimal("sNaN"), fractions.Fraction(10**400), Late()])
@pytest.mark.parametrize("background", [False, True])
def test_unreadable_metrics_are_left_out(tmp_path: Path, events: list[Event], value: Any, background: bool) -> None:
    """Save the other metrics. One warning names the missing metric."""
    path = tmp_path / "store" / "run"
    with relight.Checkpointer(
        path, x=torch.zeros(2), save=relight.best("odd", "min"), background=background, signals=False
    ) as ckpt:
        ckpt.restore()
        for step in range(3):
            ckpt.step(step, odd=value, loss=0.25)
        assert ckpt.save(2, metrics={"odd": value, "loss": 0.25}).error is None
    assert saved(path) == {"loss": 0.25}
    assert [event.fields["metric"] for event in events if event.name == "metric.unreadable"] == ["odd"]


@pytest.mark.parametrize("name", ["x" * 501, "\ud800"])
def test_a_name_that_no_record_can_hold_is_refused_at_the_step(tmp_path: Path, name: str) -> None:
    """Such a name is refused at the step. Otherwise each save would fail, hours later."""
    ckpt = relight.Checkpointer(tmp_path / "run", x=torch.zeros(2), save=None, background=False, signals=False)
    ckpt.restore()
    with pytest.raises(ConfigError, match="at most 500 characters"):
        ckpt.step(0, **{name: 1.0})
    ckpt.step(0, **{"ö" * 500: 1.0})
    ckpt.close()


def test_more_metrics_than_a_record_holds_are_left_out(tmp_path: Path, events: list[Event]) -> None:
    """The first of them are kept, the save is made, and one line reports the rest."""
    path = tmp_path / "store" / "run"
    with relight.Checkpointer(path, x=torch.zeros(2), save=None, background=False, signals=False) as ckpt:
        ckpt.restore()
        save = ckpt.save(0, metrics={"loss": 1.0, **{f"norm/{number}/{'ö' * 100}": 1.0 for number in range(20_000)}})
        assert save.error is None
    assert "loss" in saved(path) and 100 < len(saved(path)) < 20_000
    assert len([event for event in events if event.name == "metric.unreadable"]) == 1


def test_an_array_that_the_script_reuses_keeps_the_steps_value(tmp_path: Path) -> None:
    """Record the value that the step reported in a later save of the same step, as at the end."""
    buffer = np.array([1.0])
    with relight.Checkpointer(tmp_path / "run", x=torch.zeros(2), save=None, background=False, signals=False) as ckpt:
        ckpt.restore()
        ckpt.step(0, loss=buffer)
        buffer[0] = 7.0
    assert saved(tmp_path / "run") == {"loss": 1.0}
