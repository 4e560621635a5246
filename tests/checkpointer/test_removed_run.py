"""A run's directory is removed while the run trains. The error reports it, and a new log starts there only if the
caller requested it."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import relight
from relight.errors import ConfigError, CorruptCheckpoint, RunRemoved
from relight.log import Log, fold
from relight.observe import counters
from relight.store import open_bytes


def train(path: Path, *, removes: str, background: bool, begin_again: bool) -> relight.Checkpointer:
    """Train six steps. ``removes`` is deleted after the third."""
    ckpt = relight.Checkpointer(
        path / "store" / "run",
        model=torch.nn.Linear(4, 4),
        save=relight.every(steps=1),
        background=background,
        signals=False,
        on_failure=relight.failure_policy(begin_again=begin_again),
        limits=relight.Limits(deadline_s=20, when_busy="queue"),
    )
    ckpt.restore()
    for step in range(6):
        ckpt.step(step)
        if step == 2:
            ckpt._saves.drain()
            shutil.rmtree(path / removes)
    return ckpt


def steps_of(path: Path) -> list[int]:
    return [checkpoint.step for checkpoint in fold(Log(open_bytes(path / "store"), "run").read()).live]


@pytest.mark.parametrize(("removes", "background"), [("store/run", False), ("store", False), ("store/run", True)])
def test_a_new_log_is_begun_if_asked(tmp_path: Path, removes: str, background: bool) -> None:
    """With ``begin_again`` the run continues in the same place, and its last step is saved."""
    before = counters["run.renewed"]
    train(tmp_path, removes=removes, background=background, begin_again=True).close()
    assert counters["run.renewed"] == before + 1
    assert steps_of(tmp_path)[-1] == 5
    model = torch.nn.Linear(4, 4)
    with relight.Checkpointer(tmp_path / "store" / "run", model=model, save=None, background=False) as again:
        assert again.restore() == 6


def test_no_log_is_begun_unasked(tmp_path: Path) -> None:
    """Fail each save without ``begin_again``. The error names the missing directory and the remedy."""
    ckpt = train(tmp_path, removes="store/run", background=False, begin_again=False)
    save = ckpt.save(6)
    assert isinstance(save.error, RunRemoved) and isinstance(save.error, CorruptCheckpoint)
    assert "moved or deleted" in save.error.what and "begin_again=True" in save.error.hint
    ckpt.close()
    assert not list((tmp_path / "store" / "run").iterdir())


def test_checkpoints_that_are_left_are_not_hidden(tmp_path: Path) -> None:
    """If only the log was removed, no new log is begun, because it would hide the checkpoints. This is reported
    once."""
    before = counters["save.failed"]
    ckpt = train(tmp_path, removes="store/run/log", background=False, begin_again=True)
    assert counters["save.failed"] - before == 3 + 1
    ckpt.close()
    assert not (tmp_path / "store" / "run" / "log").exists()


def test_the_option_is_checked() -> None:
    """A value other than True or False is refused at once."""
    with pytest.raises(ConfigError, match="begin_again"):
        relight.failure_policy(begin_again="yes")  # type: ignore[arg-type]
