"""The log states the normal end of a run, also if a trigger has saved its last step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.checkpointer.adaptive_schedule import attempt_lifetimes
from relight.checkpointer.takeover import sign_of_life
from relight.commit import Attempt
from relight.errors import StoreUnavailable
from relight.format.topics import RUN_ENDED
from relight.log import History, Log, fold
from relight.run_records import run_end
from relight.run_records.run_end import has_ended, record_end
from relight.store import LocalStore


def train(store: Path, steps: int, every: int, *, background: bool = False, fails: bool = False) -> None:
    """Train up to ``steps``, and leave the block normally or with an exception."""
    trigger = relight.every(steps=every)
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(store / "run", model=model, save=trigger, background=background) as ckpt:
        for step in range(ckpt.restore(), steps):
            ckpt.step(step)
        if fails:
            raise ZeroDivisionError


def history_of(store: Path) -> History:
    """Return the run's history."""
    return fold(Log(LocalStore(str(store)), "run").read())


@pytest.mark.parametrize("background", [False, True])
def test_the_end_is_recorded_once_if_a_trigger_saved_the_last_step(background: bool, tmp_path: Path) -> None:
    """No checkpoint of its own is written for the end. A run that is started again and has no step left keeps it ended."""
    train(tmp_path, 4, 2, background=background)
    history = history_of(tmp_path)
    assert has_ended(history)
    assert len(history.live) == 2 or background  # the agent may not be ready for the first one
    is_scheduled = history.live[-1].body.save_reason.kind == "every"
    assert [note.step for _, note in RUN_ENDED.among(history.notes)] == ([3] if is_scheduled else [])
    train(tmp_path, 4, 2)
    assert has_ended(history_of(tmp_path))


def test_the_save_at_the_end_states_it_already(tmp_path: Path) -> None:
    """Then no record is added."""
    train(tmp_path, 5, 2)
    history = history_of(tmp_path)
    assert has_ended(history) and not list(RUN_ENDED.among(history.notes))


def test_an_ended_attempt_is_no_failure_and_no_sign_of_life(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """``relight.adaptive()`` counts failures of earlier attempts; a second start waits for a process that may be alive."""
    train(tmp_path, 4, 2)
    monkeypatch.setattr("relight.checkpointer.takeover._host", lambda: "another")
    assert attempt_lifetimes(history_of(tmp_path), 10**6)[0] == ()
    store = LocalStore(str(tmp_path))
    assert sign_of_life(store, "run") is None
    last = max(entry.name for entry in store.list("run/log") if not entry.is_dir)
    store.delete(f"run/log/{last}")  # as a killed process leaves the log
    assert len(attempt_lifetimes(history_of(tmp_path), 10**6)[0]) == 1
    assert sign_of_life(store, "run") is not None


def test_an_exception_is_no_normal_end(tmp_path: Path) -> None:
    """The last step is saved; the run counts as active."""
    with pytest.raises(ZeroDivisionError):
        train(tmp_path, 4, 2, fails=True)
    assert not has_ended(history_of(tmp_path))


def test_the_next_attempt_is_not_ended(tmp_path: Path) -> None:
    """Nor can a former attempt record its end after that."""
    train(tmp_path, 4, 2)
    epoch = history_of(tmp_path).epoch
    Attempt.begin(LocalStore(str(tmp_path)), "run", reason="restored")
    assert not has_ended(history_of(tmp_path))
    record_end(Log(LocalStore(str(tmp_path)), "run"), epoch, 3)
    assert len(list(RUN_ENDED.among(history_of(tmp_path).notes))) == 1


def test_a_store_that_fails_at_the_end_does_not_fail_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every checkpoint is safe, so ``close()`` succeeds."""

    def fail(*_: object) -> None:
        raise StoreUnavailable("the disk is gone", retryable=True)

    monkeypatch.setattr("relight.checkpointer.session.record_end", fail)
    assert run_end.record_end is not fail
    train(tmp_path, 4, 2)
    assert [checkpoint.step for checkpoint in history_of(tmp_path).live] == [1, 3]
