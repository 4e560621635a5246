"""A run's directory is replaced while the run trains: by an older copy of itself, or by a file. The save fails with an error
that reports it; nothing is deleted, and training continues."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import relight
from relight.catalog.locate import locate
from relight.commit import Attempt
from relight.commit.save import refuse_if_fenced
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RunReplaced, StoreUnavailable
from relight.format.records import NoteBody
from relight.log import Log, fold
from relight.store import open_bytes


def trainer(path: Path, background: bool) -> relight.Checkpointer:
    ckpt = relight.Checkpointer(
        path / "store" / "run",
        model=torch.nn.Linear(4, 4),
        save=None,
        background=background,
        signals=False,
        limits=relight.Limits(deadline_s=20, when_busy="queue"),
    )
    ckpt.restore()
    return ckpt


def steps_of(path: Path) -> list[int]:
    return [checkpoint.step for checkpoint in fold(Log(open_bytes(path / "store"), "run").read()).live]


def copy(path: Path, name: str) -> None:
    shutil.copytree(path / "store" / "run", path / name)


def replace(path: Path, name: str) -> None:
    """Put the copy in the place of the run, and move the run away."""
    (path / "store" / "run").rename(path / "trained")
    (path / name).rename(path / "store" / "run")


def files(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


@pytest.mark.parametrize("background", [False, True])
def test_a_copy_from_before_the_attempt_takes_no_save(tmp_path: Path, background: bool) -> None:
    """Every save fails, and the copy keeps what it has. A new start continues from the copy."""
    with trainer(tmp_path, background) as first:
        first.save(0)
    copy(tmp_path, "older")
    ckpt = trainer(tmp_path, background)
    for step in (1, 2):
        assert ckpt.save(step).error is None
    replace(tmp_path, "older")
    before = files(tmp_path / "store" / "run")
    for step in (3, 4, 5):
        save = ckpt.save(step)
        assert isinstance(save.error, RunReplaced), step
        assert "replaced" in save.error.what and save.error.where.endswith("run") and "start again" in save.error.hint
    ckpt.close(save=False)
    assert files(tmp_path / "store" / "run") == before and steps_of(tmp_path) == [0]
    with trainer(tmp_path, background) as again:
        assert again.save(3).error is None
    assert steps_of(tmp_path) == [0, 3]


@pytest.mark.parametrize("background", [False, True])
def test_a_copy_of_the_attempt_fails_one_save(tmp_path: Path, background: bool) -> None:
    """The copy has the attempt's FENCE: one save reports the missing checkpoints, and later saves continue there."""
    ckpt = trainer(tmp_path, background)
    assert ckpt.save(0).error is None
    copy(tmp_path, "older")
    assert ckpt.save(1).error is None
    replace(tmp_path, "older")
    error = ckpt.save(2).error
    assert isinstance(error, RunReplaced) and isinstance(error, CorruptCheckpoint) and "is not in its log" in error.what
    assert ckpt.save(3).error is None
    ckpt.close()
    assert steps_of(tmp_path) == [0, 3]


def test_a_copy_that_has_grown_is_found_by_the_records_bytes(tmp_path: Path) -> None:
    """The replacement is detected, even if another process appended to the copy so that no record number is missing."""
    ckpt = trainer(tmp_path, False)
    assert ckpt.save(0).error is None
    copy(tmp_path, "older")
    assert ckpt.save(1).error is None
    replace(tmp_path, "older")
    other = Log(open_bytes(tmp_path / "store"), "run")
    other.append(lambda view: (NoteBody(topic="other", data={}), fold(view).epoch))
    error = ckpt.save(2).error
    assert isinstance(error, RunReplaced) and "is another one" in error.what
    ckpt.close(save=False)
    assert steps_of(tmp_path) == [0]


@pytest.mark.parametrize("begin_again", [False, True])
def test_no_new_log_is_begun_over_a_copy(tmp_path: Path, begin_again: bool) -> None:
    """``begin_again`` is for a removed run: the copy has checkpoints, so its log is not taken over."""
    with trainer(tmp_path, False) as first:
        first.save(0)
    copy(tmp_path, "older")
    ckpt = relight.Checkpointer(
        tmp_path / "store" / "run",
        model=torch.nn.Linear(4, 4),
        save=None,
        background=False,
        signals=False,
        on_failure=relight.failure_policy(begin_again=begin_again),
    )
    ckpt.restore()
    assert ckpt.save(1).error is None
    replace(tmp_path, "older")
    assert isinstance(ckpt.save(2).error, RunReplaced) and isinstance(ckpt.save(3).error, RunReplaced)
    ckpt.close(save=False)
    assert steps_of(tmp_path) == [0]


def test_a_damaged_record_is_no_other_run(tmp_path: Path) -> None:
    """If a FENCE or the last record is damaged where it is stored, saves continue: their epoch is unchanged."""
    attempt = Attempt.begin(open_bytes(tmp_path), "run")
    attempt.note(NoteBody(topic="first", data={}))
    for file in sorted((tmp_path / "run" / "log").rglob("0*"))[1:]:
        file.chmod(0o600)
        file.write_bytes(b"damaged")
    attempt.note(NoteBody(topic="second", data={}))
    fresh = Log(open_bytes(tmp_path), "run").read()
    assert fold(fresh).epoch < attempt.epoch and fresh.damaged
    refuse_if_fenced(fresh, attempt.epoch)


def test_a_file_in_the_place_of_the_directory_is_named(tmp_path: Path) -> None:
    """The error of the save and that of a reader both report the file."""
    ckpt = trainer(tmp_path, False)
    assert ckpt.save(0).error is None
    (tmp_path / "store" / "run").rename(tmp_path / "trained")
    (tmp_path / "store" / "run").write_text("a note")
    error = ckpt.save(1).error
    assert (
        isinstance(error, StoreUnavailable)
        and "this is a file, and a directory was expected" in error.what
        and error.where.endswith("store/run")
    )
    ckpt.close(save=False)
    with pytest.raises(CheckpointNotFound, match="this is a file, and a directory was expected"):
        Log(open_bytes(tmp_path / "store"), "run").read()
    with pytest.raises(CheckpointNotFound, match="a file is in the place of the run's directory"):
        locate(str(tmp_path / "store" / "run"))
    assert (tmp_path / "store" / "run").read_text() == "a note"
