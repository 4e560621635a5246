"""Recallable checkpoints: they stay until a SWEEP, and the log decides which came first."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, Fenced
from relight.log import Log, fold
from relight.policy import keep
from relight.policy.tiers import Tier, decode_tiers, encode_tiers
from relight.reader import verify_checkpoint
from relight.reclaim import due_of, execute, execute_sweep, plan_prune, plan_sweep, recall, sweep_recallable
from relight.store import LocalStore


class Hours:
    """A clock for records, in hours since a day's beginning."""

    def __init__(self) -> None:
        self.now = 0

    def __call__(self) -> str:
        return f"2026-03-{1 + self.now // 24:02d}T{self.now % 24:02d}:00:00Z"


@pytest.fixture
def run(tmp_path: Path) -> tuple[LocalStore, Attempt, Hours]:
    store, hours = LocalStore(tmp_path), Hours()
    attempt = Attempt.begin(store, "run")
    attempt.place.log._now = hours
    return store, attempt, hours


def live(store: LocalStore) -> list[str]:
    return [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live]


def prune(store: LocalStore, attempt: Attempt, undo: str | None = "2h") -> list[str]:
    log = attempt.place.log
    return execute(
        plan_prune(store, "run", keep(last=1, undo_window=undo), log=log), store, epoch=attempt.epoch, log=log
    ).retired


def directory(store: LocalStore, one: str) -> list[Path]:
    return list(Path(store.url.removeprefix("file://")).glob(f"run/*{one}*/*.safetensors"))


def test_retired_recalled_and_whole(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """A recalled checkpoint has its old place in the history, verifies, and obeys the rules again."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(4)]
    assert prune(store, attempt) == ids[:3]
    assert live(store) == ids[3:]
    assert all(directory(store, checkpoint_id) for checkpoint_id in ids)
    recall(store, "run", [ids[2], ids[0]], "wanted")
    assert live(store) == [ids[0], ids[2], ids[3]]
    view = Log(store, "run").read()
    assert not [finding for checkpoint in fold(view).live for finding in verify_checkpoint(store, view, checkpoint)]
    assert sorted(prune(store, attempt)) == sorted([ids[0], ids[2]])


def test_a_sweep_leaves_what_may_be_recalled(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """A sweep of any process and attempt keeps it and states why."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    Attempt.begin(store, "run")
    plan = plan_sweep(store, "run")
    assert [reason for name, reason in plan.held if ids[0] in name] == ["retired, and still recallable"]
    execute_sweep(plan, store)
    assert directory(store, ids[0])


def test_it_goes_when_its_time_is_over_by_the_records(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """Two hours are over when a record is two hours younger than the RETIRE: then the next pruning deletes it, and it cannot come back."""
    store, attempt, hours = run
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    hours.now = 1
    ids.append(save(attempt, 2))
    prune(store, attempt)
    assert directory(store, ids[0]) and directory(store, ids[1])
    hours.now = 2
    ids.append(save(attempt, 3))
    prune(store, attempt)
    assert not directory(store, ids[0])
    assert directory(store, ids[1])
    with pytest.raises(CheckpointNotFound, match="were swept"):
        recall(store, "run", [ids[0]])
    recall(store, "run", [ids[1]])
    assert live(store) == [ids[1], ids[3]]


def test_a_clock_that_was_ahead_ends_nothing_early(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """A RETIRE, or a record before it, with a time in the far future counts as no later than the records after it."""
    store, attempt, hours = run
    hours.now = 600
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    hours.now = 1
    save(attempt, 2)
    view = Log(store, "run").read()
    assert due_of(view, fold(view)) == []
    hours.now = 3
    save(attempt, 3)
    view = Log(store, "run").read()
    assert due_of(view, fold(view)) == [ids[0]]


@pytest.mark.parametrize("first", ["recall", "sweep"])
def test_whichever_comes_first_in_the_log_holds(run: tuple[LocalStore, Attempt, Hours], first: str) -> None:
    """Two that plan at once: the second finds what the first has done, and neither deletes what is live."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    stale = Log(store, "run")
    stale.read()
    if first == "recall":
        recall(store, "run", [ids[0]])
        assert sweep_recallable(store, "run", [ids[0]], log=stale) == ([], [])
        assert live(store) == ids and directory(store, ids[0])
    else:
        deleted, _ = sweep_recallable(store, "run", [ids[0]], log=stale)
        assert len(deleted) == 1
        with pytest.raises(CheckpointNotFound):
            recall(store, "run", [ids[0]])
        assert live(store) == ids[1:] and not directory(store, ids[0])


def test_a_superseded_attempt_gives_nothing_up(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """A zombie's SWEEP is refused before it is written, and void if it were."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    Attempt.begin(store, "run")
    with pytest.raises(Fenced):
        sweep_recallable(store, "run", [ids[0]], epoch=attempt.epoch)
    assert directory(store, ids[0])


def test_without_undo_it_goes_at_once(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """Without ``undo`` a retired checkpoint is deleted at once. Earlier retired ones stay recallable for their time."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(2)]
    prune(store, attempt)
    ids.append(save(attempt, 2))
    prune(store, attempt, undo=None)
    assert directory(store, ids[0]) and not directory(store, ids[1])
    with pytest.raises(CheckpointNotFound, match="were swept"):
        recall(store, "run", [ids[1]])


def test_all_or_none(run: tuple[LocalStore, Attempt, Hours]) -> None:
    """One id that cannot be recalled, and none is."""
    store, attempt, _ = run
    ids = [save(attempt, step) for step in range(3)]
    prune(store, attempt)
    with pytest.raises(CheckpointNotFound):
        recall(store, "run", [ids[0], "nosuchid00"])
    assert live(store) == ids[2:]


def test_the_time_travels_with_a_tiers_rules() -> None:
    """A tier's rules with a window are read back from the log. An invalid window is refused where it is set."""
    tier = Tier("file:///x/run", keep(last=2, undo_window="90m"), None, "cold")
    assert decode_tiers(encode_tiers([tier])) == (tier,)
    with pytest.raises(ConfigError):
        keep(last=1, undo_window="soon")
