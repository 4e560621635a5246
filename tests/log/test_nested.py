"""A run is no store, and a store is no run."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight


def save(path: Path, step: int = 0) -> None:
    """Save one checkpoint in this run."""
    relight.save(path, {"w": torch.ones(2)}, step=step)


@pytest.mark.parametrize("below", ["seed1", "0000000000-abcdefghij-e1"])
def test_a_run_is_not_made_inside_a_run(tmp_path: Path, below: str) -> None:
    """A path below a run is refused, and the run's own path still names the run."""
    save(tmp_path / "demo")
    with pytest.raises(relight.ConfigError, match="inside another run"):
        save(tmp_path / "demo" / below)
    ckpt = relight.Checkpointer(tmp_path / "demo" / below, model=torch.nn.Linear(1, 1), signals=False)
    with pytest.raises(relight.ConfigError, match="inside another run"):
        ckpt.restore()
    assert not (tmp_path / "demo" / "relight.json").exists()
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "demo").checkpoints()] == [0]


def test_a_store_is_not_made_a_run(tmp_path: Path) -> None:
    """The path of a store without a run's name is refused, and the error lists the runs.

    Nothing is created next to it.
    """
    save(tmp_path / "runs" / "demo")
    for attempt in (
        lambda: save(tmp_path / "runs"),
        lambda: relight.Checkpointer(tmp_path / "runs", model=torch.nn.Linear(1, 1), signals=False).restore(),
    ):
        with pytest.raises(relight.ConfigError, match=r"names no run(.|\n)*runs/demo"):
            attempt()
    assert not (tmp_path / "runs" / "log").exists()


def test_one_slash_after_a_scheme_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``s3:/bucket/run`` is not a local directory named ``s3:``."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(relight.ConfigError, match=r"s3://bucket"):
        relight.Checkpointer("s3:/bucket/demo", model=torch.nn.Linear(1, 1))
    assert not any(tmp_path.iterdir())


def test_a_store_is_not_read_as_a_run(tmp_path: Path) -> None:
    """``load("runs")`` asked "did you mean runs?": now it names a run of the store."""
    save(tmp_path / "runs" / "demo")
    with pytest.raises(relight.CheckpointNotFound, match=r"this path is a store(.|\n)*runs/demo"):
        relight.load(tmp_path / "runs")
    (tmp_path / "empty").mkdir()
    with pytest.raises(relight.CheckpointNotFound, match="no run 'empty' here") as caught:
        relight.load(tmp_path / "empty")
    assert "did you mean empty" not in str(caught.value)


def test_a_checkpoint_of_another_run_is_reached_by_a_branch(tmp_path: Path) -> None:
    """``restore("mine@99")`` names the command that begins a run at another run's checkpoint."""
    save(tmp_path / "mine", step=99)
    for run in ("other", "mine"):
        ckpt = relight.Checkpointer(tmp_path / run, model=torch.nn.Linear(1, 1), signals=False)
        with pytest.raises(relight.CheckpointNotFound, match="relight branch .*@"):
            ckpt.restore("mine@99")


def test_a_misspelt_run_is_named(tmp_path: Path) -> None:
    """Reading a run that is not there names the one that could be meant."""
    save(tmp_path / "demo")
    with pytest.raises(relight.CheckpointNotFound, match="did you mean demo"):
        relight.load(tmp_path / "dmeo")
