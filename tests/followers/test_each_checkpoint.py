"""Which checkpoints wait, and when a process that handles each one ends."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.followers import followed_log
from relight.followers.each_checkpoint import Ending, Selection, each_checkpoint, is_finished, waiting
from relight.followers.followed_log import FollowedLog
from relight.format import encode_tree
from relight.format.root_keys import SUSPECT
from relight.format.topics import ROLLED_BACK, RollbackNote
from relight.log import History, fold
from relight.log.log import Log
from relight.policy import Keep
from relight.reclaim.prune import execute, plan_prune
from relight.run_records.fresh_starts import record_fresh_start
from relight.save_reason import END, SaveReason
from relight.store import LocalStore


class Trainer:
    """Saves checkpoints without tensors."""

    def __init__(self, path: Path) -> None:
        self.store = LocalStore(str(path))
        self.attempt = Attempt.begin(self.store, "run")

    def save(self, *steps: int, reason: SaveReason | None = None, suspect: bool = False) -> None:
        """Commit a checkpoint for each step."""
        user = SUSPECT.field("replicas differ") if suspect else {}
        for step in steps:
            info = SaveInfo(step, reason=reason or SaveReason("every", "every 1 steps"), user=user)
            self.attempt.save(SaveRequest(info, tree=encode_tree({"step": step}), items=[]))

    def roll_back(self, before: int) -> None:
        """Set the checkpoints at and after a step aside."""
        note = ROLLED_BACK.note(RollbackNote(before=before))
        Log(self.store, "run").append(lambda view: (note, fold(view).epoch))

    @property
    def history(self) -> History:
        """The present history."""
        return self.attempt.history()

    def waiting(self, selection: Selection, done: Sequence[int] = ()) -> list[int]:
        """Return the steps that wait."""
        every = [*self.history.live, *self.history.retired.values()]
        ids = {checkpoint.id for checkpoint in every if checkpoint.step in done}
        return [checkpoint.step for checkpoint in waiting(self.history, selection, ids)]


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    """A run with checkpoints of steps 1 to 6."""
    trainer = Trainer(tmp_path / "s")
    trainer.save(1, 2, 3, 4, 5, 6)
    return trainer


@pytest.mark.parametrize(
    ("selection", "done", "steps"),
    [
        (Selection(), [], [6]),
        (Selection(), [3], [6]),
        (Selection(), [6], []),
        (Selection(queue=2), [3], [5, 6]),
        (Selection(queue=9), [3], [4, 5, 6]),
        (Selection(queue=None), [3, 5], [1, 2, 4, 6]),
        (Selection(nth=2), [2], [6]),
        (Selection(nth=2), [3], [5]),
        (Selection(nth=2, queue=9), [2], [4, 6]),
        (Selection(nth=2, queue=None), [], [1, 3, 5]),
        (Selection(nth=4, queue=None), [4], []),
        (Selection(until=4), [], [4]),
        (Selection(until=4, queue=None), [2], [1, 3, 4]),
        (Selection(until=9), [], [6]),
        (Selection("3"), [], [3]),
        (Selection("3"), [3], []),
        (Selection("none-yet"), [], []),
    ],
    ids=str,
)
def test_what_waits_follows_from_the_log(
    selection: Selection, done: list[int], steps: list[int], trainer: Trainer
) -> None:
    """The newest replaces older ones in a bounded queue; without a bound, all wait in order."""
    assert trainer.waiting(selection, done) == steps


def test_what_retention_removed_does_not_wait(trainer: Trainer) -> None:
    """It counts for every Nth all the same."""
    execute(plan_prune(trainer.store, "run", Keep(last=3)), trainer.store)
    assert trainer.waiting(Selection(queue=None)) == [4, 5, 6]
    assert trainer.waiting(Selection(nth=2, queue=None), [1]) == [5]


def test_what_cannot_be_handled_gives_way_to_an_older_one(trainer: Trainer) -> None:
    """Unless a newer one was handled."""
    ids = {checkpoint.step: checkpoint.id for checkpoint in trainer.history.live}
    newest = waiting(trainer.history, Selection(), (), {ids[6]})
    assert [checkpoint.step for checkpoint in newest] == [5]
    assert waiting(trainer.history, Selection(), {ids[5]}, {ids[6]}) == []
    assert waiting(trainer.history, Selection("6"), (), {ids[6]}) == []


def test_an_ambiguous_best_is_an_error(trainer: Trainer) -> None:
    """A selector that never becomes valid does not wait for ever."""
    with pytest.raises(ConfigError):
        trainer.waiting(Selection("step=x"))


def test_a_run_is_finished_after_the_last_save_of_its_last_attempt(trainer: Trainer) -> None:
    """Until another attempt begins."""
    assert not is_finished(trainer.history)
    trainer.save(7, reason=END)
    assert is_finished(trainer.history)
    trainer.attempt = Attempt.begin(trainer.store, "run", reason="restored")
    assert not is_finished(trainer.history)
    trainer.save(8, reason=END)
    trainer.roll_back(before=8)  # by the next attempt, before it begins
    assert not is_finished(trainer.history)


def handled(trainer: Trainer, selection: Selection, ending: Ending, most: int = 99) -> list[int]:
    """Handle the yielded checkpoints, and save another one during each. Return their steps."""
    ids, steps = set[str](), []
    for checkpoint in each_checkpoint(trainer.store, "run", selection, lambda _: ids, ending, every_s=0.01):
        ids.add(checkpoint.id)
        steps.append(checkpoint.step)
        if len(steps) < most:
            trainer.save(max(each.step for each in trainer.history.live) + 1)
        else:
            ending.stopping.set()
    return steps


def test_once_handles_what_exists_now(trainer: Trainer) -> None:
    """Newer checkpoints are left."""
    assert handled(trainer, Selection(queue=None), Ending(threading.Event(), once=True)) == [1, 2, 3, 4, 5, 6]
    assert handled(trainer, Selection(), Ending(threading.Event(), once=True)) == [12]


def test_it_ends_at_a_step_or_when_stopped(trainer: Trainer) -> None:
    """``until`` handles the first checkpoint at or after the step."""
    assert handled(trainer, Selection(until=8), Ending(threading.Event())) == [6, 7, 8]
    assert handled(trainer, Selection(), Ending(threading.Event()), most=2) == [9, 10]


def followed_until(trainer: Trainer, until: int) -> Iterator[int]:
    """Yield the steps of the checkpoints that are handled, all in order."""
    ids, ending = set[str](), Ending(threading.Event())
    selection = Selection(queue=None, until=until)
    for checkpoint in each_checkpoint(trainer.store, "run", selection, lambda _: ids, ending, every_s=0.01):
        ids.add(checkpoint.id)
        yield checkpoint.step


def test_the_end_is_no_checkpoint_that_a_rollback_set_aside(trainer: Trainer) -> None:
    """The repeated steps are handled, and the end is the repeated checkpoint."""
    trainer.roll_back(before=3)
    steps = followed_until(trainer, 5)
    assert [next(steps), next(steps)] == [1, 2]
    timer = threading.Timer(0.3, lambda: trainer.save(3, 4, 5, 6))
    timer.start()
    assert list(steps) == [3, 4, 5]
    timer.join()


def test_the_end_is_not_set_aside_although_retention_had_removed_it(trainer: Trainer) -> None:
    """Also a retired checkpoint does not count, if a rollback discarded its step later."""
    execute(plan_prune(trainer.store, "run", Keep(last=1, every=2)), trainer.store)
    assert [checkpoint.step for checkpoint in trainer.history.live] == [1, 3, 5, 6]
    trainer.roll_back(before=4)
    timer = threading.Timer(0.3, lambda: trainer.save(4, 5))
    timer.start()
    assert list(followed_until(trainer, 4)) == [1, 3, 4]
    timer.join()


def test_the_end_is_no_suspect_checkpoint(trainer: Trainer) -> None:
    """It is not handled, so another one must be the last."""
    trainer.save(7, suspect=True)
    timer = threading.Timer(0.3, lambda: trainer.save(8, 9))
    timer.start()
    assert list(followed_until(trainer, 7)) == [1, 2, 3, 4, 5, 6, 8]
    timer.join()


def test_the_end_comes_after_the_last_start_from_scratch(trainer: Trainer) -> None:
    """``fresh=True`` repeats all steps."""
    trainer.attempt = Attempt.begin(trainer.store, "run", reason="fresh")
    record_fresh_start(Log(trainer.store, "run"), "")
    timer = threading.Timer(0.3, lambda: trainer.save(1, 2, 3))
    timer.start()
    assert list(followed_until(trainer, 2)) == [1, 2, 3, 4, 5, 6, 1, 2]
    timer.join()


def test_each_nth_ends_at_the_same_step_whatever_was_saved_meanwhile(trainer: Trainer) -> None:
    """What is handled does not depend on how often the log is read."""
    assert trainer.waiting(Selection(nth=3, queue=None, until=3)) == [1]
    assert handled(trainer, Selection(nth=3, queue=None, until=3), Ending(threading.Event())) == [1]


def test_it_ends_when_the_run_is_over(trainer: Trainer) -> None:
    """The last checkpoint is handled first, whether the log or the run's processes report the end."""
    ids, ending = set[str](), Ending(threading.Event(), is_over=lambda: True)
    for checkpoint in each_checkpoint(trainer.store, "run", Selection(), lambda _: ids, ending, every_s=0.01):
        ids.add(checkpoint.id)
    assert [trainer.history.find(each).step for each in ids] == [6]  # type: ignore[union-attr]
    trainer.save(7, reason=END)
    last = each_checkpoint(trainer.store, "run", Selection(), lambda _: ids, Ending(threading.Event()), every_s=0.01)
    for checkpoint in last:
        ids.add(checkpoint.id)
    assert len(ids) == 2


def test_a_run_that_does_not_exist_is_waited_for(tmp_path: Path) -> None:
    """Except with ``once``."""
    store = LocalStore(str(tmp_path / "s"))
    with pytest.raises(CheckpointNotFound):
        list(each_checkpoint(store, "run", Selection(), lambda _: (), Ending(threading.Event(), once=True), every_s=1))
    timer = threading.Timer(0.3, lambda: Trainer(tmp_path / "s").save(1))
    timer.start()
    steps = each_checkpoint(store, "run", Selection(), lambda _: (), Ending(threading.Event()), every_s=0.01)
    assert next(steps).step == 1
    timer.join()


def test_a_store_that_does_not_answer_is_polled_again(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is reported once. An error that will not pass is raised."""
    reports, failures, read = list[str](), [StoreUnavailable("no answer")] * 3, Log.read

    def failing(log: Log) -> object:
        if failures:
            raise failures.pop()
        return read(log)

    monkeypatch.setattr(Log, "read", failing)
    ending = Ending(threading.Event())
    steps = each_checkpoint(
        trainer.store, "run", Selection(), lambda _: (), ending, every_s=0.01, report=reports.append
    )
    assert next(steps).step == 6 and len(reports) == 1
    failures.append(StoreUnavailable("not permitted", retryable=False))
    with pytest.raises(StoreUnavailable):
        next(steps)


def test_a_run_that_was_begun_again_is_followed(trainer: Trainer, tmp_path: Path) -> None:
    """Its log is another one, with lower numbers."""
    ids = set[str]()
    steps = each_checkpoint(trainer.store, "run", Selection(), lambda _: ids, Ending(threading.Event()), every_s=0.01)
    ids.add(next(steps).id)
    (tmp_path / "s/run").rename(tmp_path / "old")
    Trainer(tmp_path / "s").save(1)
    assert next(steps).step == 1


def test_a_damaged_record_is_read_once(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log with a record that stays damaged is not read again from its begin at each poll."""
    log = FollowedLog(trainer.store, "run")
    path = sorted(each for each in Path(trainer.store.url, "run", "log").rglob("*") if each.is_file())[2]
    path.write_bytes(b"{" + path.read_bytes())
    head = log.read().head
    made, begin = list[str](), Log.__init__
    assert log.read().faults

    def counted(self: Log, *given: object, **options: object) -> None:
        made.append("log")
        begin(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Log, "__init__", counted)
    for _ in range(5):
        log.read()
    trainer.save(7)
    assert log.read().head > head and made == []


def test_a_damaged_newest_record_is_not_another_run(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    """A comparison with the store does not read the whole log again, although the newest record is damaged."""
    monkeypatch.setattr(followed_log, "COMPARE_S", 0.0)
    path = sorted(each for each in Path(trainer.store.url, "run", "log").rglob("*") if each.is_file())[-1]
    path.write_bytes(b"{" + path.read_bytes())
    log = FollowedLog(trainer.store, "run")
    for _ in range(2):
        log.read()
    made, begin = list[str](), Log.__init__

    def counted(self: Log, *given: object, **options: object) -> None:
        made.append("log")
        begin(self, *given, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(Log, "__init__", counted)
    for _ in range(5):
        assert log.read().faults
    assert made == []
