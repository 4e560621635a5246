"""Properties of the checkpoints that ``relight.open(…)`` returns, and paths with a checkpoint."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
import torch

import relight


@pytest.fixture
def run(tmp_path: Path) -> str:
    """A run with two checkpoints, the first with a tag and a branch."""
    for step, loss in ((399, 0.5), (400, 0.25)):
        relight.save(tmp_path / "run", {"weights": torch.ones(1000)}, step=step, metrics={"val/loss": loss})
    store = relight.open(tmp_path / "run")
    store.tag("good", 399)
    store.branch("other", 399)
    return str(tmp_path / "run")


def test_checkpoints_have_what_a_table_shows(run: str) -> None:
    """Step, metrics, tags, bytes and time are properties; a branch's own tag is not among the tags."""
    first, last = relight.open(run).checkpoints()
    assert (first.step, last.step) == (399, 400)
    assert first.metrics == {"val/loss": 0.5} and last.metrics == {"val/loss": 0.25}
    assert first.tags == ("good",) and last.tags == ()
    assert first.bytes > 4000
    age = datetime.now(UTC) - datetime.fromisoformat(first.time)
    assert timedelta(seconds=-2) < age < timedelta(minutes=10)
    assert "tags good" in repr(first) and "val/loss=0.5" in repr(first)
    assert isinstance(first, relight.Checkpoint)


def test_latest_and_verify_return_the_tags_too(run: str) -> None:
    """Each method of the store gives checkpoints with their tags."""
    store = relight.open(run)
    store.tag("newest", 400)
    assert store.latest().tags == ("newest",)
    assert [(checkpoint.tags, findings) for checkpoint, findings in store.verify()] == [
        (("good",), []),
        (("newest",), []),
    ]


def test_open_refuses_a_checkpoint_and_names_the_call(run: str) -> None:
    """A path with a checkpoint is no store and no run: the error has the calls that take it."""
    with pytest.raises(relight.ConfigError) as raised:
        relight.open(f"{run}@step=400")
    assert raised.value.hint == (
        f'relight.load("{run}@step=400") returns its state; relight.open("{run}").verify("step=400") checks it'
    )
    assert relight.load(f"{run}@step=400").keys() == {"weights"}
    assert [checkpoint.step for checkpoint, _ in relight.open(run).verify("step=400")] == [400]
    with pytest.raises(relight.CheckpointNotFound):
        relight.open(f"{run}-of-another-name@step=400")
