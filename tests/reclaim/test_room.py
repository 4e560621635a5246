"""Space that is freed after a save. It stops as soon as no process needs the space."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.log import Checkpoint, History, Log, fold
from relight.policy import Keep, keep
from relight.reclaim import SpaceGuard, needs
from relight.reclaim.prune import candidates_of
from relight.store import LocalStore


def test_nothing_is_removed_once_no_trainer_is_there(tmp_path: Path) -> None:
    """A checkpoint that stays must be read first.

    The read stops at the next chunk, records no verdict, and the next call does it.
    """
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    ids = [save(attempt, step) for step in range(3)]
    room = SpaceGuard(store, "run", keep(last=1), attempt.place.log, attempt.epoch)
    asked: list[bool] = []

    def gone() -> bool:
        asked.append(False)
        return False

    assert room.prune(still=gone) is None
    assert asked == [False] and not room.verified
    assert [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live] == ids
    report = room.prune()
    assert report is not None and report.retired == ids[:2]


def test_a_plan_reads_the_needs_of_each_checkpoint_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retention decides within an append to the log: with ten thousand checkpoints, no other process may append first each time."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    for step in range(20):
        save(attempt, step)
    history, asked, needs_of = fold(Log(store, "run").read()), list[str](), needs.needs_of

    def counted(history: History, checkpoint: Checkpoint) -> list[str]:
        asked.append(checkpoint.id)
        return needs_of(history, checkpoint)

    monkeypatch.setattr(needs, "needs_of", counted)
    assert len(candidates_of(history)) == 20 and len(asked) <= 20


def test_who_keeps_everything_is_not_asked(tmp_path: Path) -> None:
    """Nothing is read, and so nothing given up."""
    store = LocalStore(tmp_path)
    attempt = Attempt.begin(store, "run")
    save(attempt, 1)

    def never() -> bool:
        pytest.fail("nothing should be read")

    report = SpaceGuard(store, "run", Keep(), attempt.place.log, attempt.epoch).prune(still=never)
    assert report is not None and not report.retired
