"""Draining: which checkpoints are copied, in which order, by which attempt, and what is recorded."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from tests.log.test_log_stale_listings import save

from relight.catalog import Run
from relight.catalog.tiers import announce, drained_to, merge, read_further
from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.commit.attempt import take_over
from relight.drain import drain
from relight.drain.outwards import residency
from relight.errors import ConfigError, CorruptCheckpoint, Fenced, StoreUnavailable
from relight.format import Leaf, encode_tree
from relight.layout import Bytes, Item
from relight.log import Log, fold
from relight.policy import Keep, Tiers, keep, tier
from relight.reader import open_checkpoint, read_tensors
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep
from relight.store import LocalStore
from relight.testing.store_suite import refuses
from relight.transfer import execute_copy, plan_copy, shared_copy


def begin(folder: Path, *, far: dict[str, Keep | None] | None = None, near: str = "near") -> Attempt:
    """Begin an attempt with further tiers."""
    tiers = Tiers(
        near=str(folder / near / "run"),
        **{name: tier(str(folder / name / "run"), keep=rules) for name, rules in (far or {"far": None}).items()},
    )
    attempt = Attempt.begin(LocalStore(folder / near), "run")
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    return attempt


def live(folder: Path, name: str) -> list[int]:
    return [checkpoint.step for checkpoint in Run(LocalStore(folder / name), "run").history().live]


def test_the_newest_goes_and_what_rules_name_for_good(tmp_path: Path) -> None:
    """A tier that keeps every third step and the last two gets these of ten saves, oldest first, and tagged ones."""
    attempt = begin(tmp_path, far={"far": keep(every=3, last=2)})
    ids = [save(attempt, step) for step in range(10)]
    Run(attempt.store, "run").tag("gold", ids[3])
    report = drain(attempt.store, "run")
    assert [copy[1] for copy in report.copied] == [ids[2], ids[3], ids[5], ids[8], ids[9]]
    assert live(tmp_path, "far") == [2, 3, 5, 8, 9], "its own rules then hold there, and the nearest run's tag"
    assert not report.errors and report.owed == {"far": []}
    assert drain(attempt.store, "run").copied == [], "there is nothing more to do"


def test_without_rules_the_newest_goes_and_all_of_it_is_the_same_to_the_byte(tmp_path: Path) -> None:
    """The copy keeps its id and has the same bytes."""
    attempt = begin(tmp_path)
    for step in range(3):
        newest = save(attempt, step)
        drain(attempt.store, "run")
    far = Run(LocalStore(tmp_path / "far"), "run")
    assert live(tmp_path, "far") == [0, 1, 2]
    checkpoint = far.history().live[-1]
    assert checkpoint.id == newest
    view = far.view()
    opened = open_checkpoint(far.store, "run", checkpoint, store_id=view.store_id, run_id=view.run_id)
    room = bytearray(4)
    read_tensors(opened, opened.parts[0], {0: Bytes(room)})
    assert bytes(room) == bytes([2] * 4)


def test_nothing_leaves_the_near_tier_that_a_further_one_still_lacks(tmp_path: Path) -> None:
    """Near retention keeps a checkpoint that a further tier lacks, with the reason, until it is copied."""
    attempt = begin(tmp_path, far={"far": keep(every=2)})
    for step in range(6):
        save(attempt, step)
    plan = plan_prune(attempt.store, "run", keep(last=1))
    assert [verdict.step for verdict in plan.verdicts if verdict.keep] == [1, 3, 5]
    assert "not on far yet" in plan.verdicts[1].reason
    execute(plan, attempt.store)
    drain(attempt.store, "run")
    plan = plan_prune(attempt.store, "run", keep(last=1))
    assert [verdict.step for verdict in plan.verdicts if verdict.keep] == [5]


@pytest.mark.parametrize("often", [True, False], ids=["drained after each save", "drained at the end"])
def test_a_tier_gets_what_stands_for_a_milestone_once(tmp_path: Path, often: bool) -> None:
    """Each multiple without a checkpoint of exactly that step is represented on the tier by the first checkpoint after
    it, whatever near retention pruned."""
    attempt = begin(tmp_path, far={"far": keep(every=4, last=1)})
    copied: list[int] = []
    for step in (1, 2, 4, 5, 6, 8, 9, 10, 15, 16):
        save(attempt, step)
        if often:
            copied += [step for _ in drain(attempt.store, "run").copied]
        execute(plan_prune(attempt.store, "run", keep(last=1)), attempt.store)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [4, 8, 10, 15, 16], (
        "nothing was saved from 12 to 15 steps, so the one after 11 stays"
    )
    execute(plan_prune(attempt.store, "run", keep(last=1)), attempt.store)
    assert live(tmp_path, "near") == [16]
    if often:
        assert copied == [1, 2, 4, 5, 6, 8, 9, 10, 15, 16], "each is the newest when it is saved"


def test_a_pruned_milestone_makes_no_later_save_one(tmp_path: Path) -> None:
    """Once the tier had the checkpoint of a period and near retention pruned it, later ones of the period are owed as
    the newest only."""
    attempt = begin(tmp_path, far={"far": keep(every=100, last=1)})
    save(attempt, 100)
    drain(attempt.store, "run")
    for step in (101, 102, 103):
        save(attempt, step)
        execute(plan_prune(attempt.store, "run", keep(last=1)), attempt.store)
    assert live(tmp_path, "near") == [103]
    assert [copy[0] for copy in drain(attempt.store, "run").copied] == ["far"]
    assert live(tmp_path, "far") == [100, 103]


def test_a_checkpoint_older_than_the_newest_copy_is_not_copied(tmp_path: Path) -> None:
    """A tag that comes late does not put the far run back to an earlier step."""
    attempt = begin(tmp_path)
    first = save(attempt, 0)
    save(attempt, 1)
    drain(attempt.store, "run")
    Run(attempt.store, "run").tag("late", first)
    assert drain(attempt.store, "run").copied == []
    assert live(tmp_path, "far") == [1]


def test_each_tier_by_itself(tmp_path: Path) -> None:
    """An unreachable tier does not delay other tiers. The near tier keeps what it lacks."""
    attempt = begin(tmp_path, far={"warm": None, "cold": None})
    (tmp_path / "warm").write_text("no directory")
    checkpoint = save(attempt, 0)
    events: list[tuple[str, str]] = []
    report = drain(attempt.store, "run", notify=lambda name, message, fields: events.append((name, fields["tier"])))
    assert set(report.errors) == {"warm"} and [copy[:2] for copy in report.copied] == [("cold", checkpoint)]
    assert events == [("drain.failed", "warm"), ("drain.done", "cold")]
    assert drained_to(attempt.history()) == {"cold": {checkpoint}}
    save(attempt, 1)
    assert all(verdict.keep for verdict in plan_prune(attempt.store, "run", keep(last=1)).verdicts if verdict.step == 1)
    (tmp_path / "warm").unlink()
    assert not drain(attempt.store, "run").errors
    assert live(tmp_path, "warm") == [1] and live(tmp_path, "cold") == [0, 1]


def test_a_superseded_attempt_copies_nothing_more(tmp_path: Path) -> None:
    """After another node's attempt took over the far tier, the old attempt's drains are refused."""
    old = begin(tmp_path, near="old")
    save(old, 0)
    drain(old.store, "run")
    new = begin(tmp_path, near="new")
    name = fold(new.view()).fences[-1].body.attempt  # type: ignore[union-attr]
    take_over(Log(LocalStore(tmp_path / "far"), "run"), name)
    save(old, 1)
    report = drain(old.store, "run")
    assert isinstance(report.errors["far"], Fenced) and live(tmp_path, "far") == [0]
    save(new, 7)
    drain(new.store, "run")
    assert live(tmp_path, "far") == [0, 7]
    assert isinstance(drain(old.store, "run").errors["far"], Fenced)


def test_an_attempt_that_is_late_in_coming_takes_over_only_from_those_it_knows(tmp_path: Path) -> None:
    """An attempt that could not reach the tier at its start takes it over from earlier attempts of its run, but not
    from another run."""
    first = begin(tmp_path, near="a")
    save(first, 0)
    drain(first.store, "run")
    second = begin(tmp_path, near="a")
    save(second, 1)
    assert not drain(second.store, "run").errors
    stranger = begin(tmp_path, near="b")
    save(stranger, 5)
    assert isinstance(drain(stranger.store, "run").errors["far"], Fenced)


def test_the_fence_is_checked_when_a_copy_commits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attempt that is superseded while it copies commits nothing, and leaves nothing."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    check = shared_copy.check_written

    def then_fenced(*arguments: object) -> tuple[str, int]:
        result = check(*arguments)  # type: ignore[arg-type]
        take_over(Log(LocalStore(tmp_path / "far"), "run"), "another")
        return result

    monkeypatch.setattr(shared_copy, "check_written", then_fenced)
    assert isinstance(drain(attempt.store, "run").errors["far"], Fenced)
    assert live(tmp_path, "far") == []
    assert [path.name for path in (tmp_path / "far" / "run").iterdir()] == ["log"]


def test_two_drains_at_once_make_one_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second drain finishes what the first one has begun: no checkpoint is stored twice, and none has failed."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    check, inner = shared_copy.check_written, []
    monkeypatch.setattr(shared_copy, "LATE_AFTER_S", 0.1)

    def another_first(*arguments: object) -> tuple[str, int]:
        result = check(*arguments)  # type: ignore[arg-type]
        if not inner:
            inner.append(True)
            assert not drain(attempt.store, "run").errors
        return result

    monkeypatch.setattr(shared_copy, "check_written", another_first)
    report = drain(attempt.store, "run")
    assert not report.errors and live(tmp_path, "far") == [0]


def test_an_interrupted_drain_is_resumed(tmp_path: Path) -> None:
    """A drain that stops during a copy commits nothing. The next one continues it at once.

    If the directory belongs to something else, the copy has another name.
    """
    attempt = begin(tmp_path)
    save(attempt, 0)
    stops = iter([False, True, True, True])
    report = drain(attempt.store, "run", stop=lambda: next(stops))
    assert isinstance(report.errors["far"], StoreUnavailable) and live(tmp_path, "far") == []
    began = time.monotonic()
    assert not drain(attempt.store, "run").errors and live(tmp_path, "far") == [0]
    assert time.monotonic() - began < shared_copy.LATE_AFTER_S
    assert [path.name for path in (tmp_path / "far" / "run").glob("*/ready")] == []
    second = save(attempt, 1)
    leftover = tmp_path / "far" / "run" / f"0000000001-{second}-e1"
    leftover.mkdir()
    (leftover / "part-00000.msgpack").write_bytes(b"half")
    assert not drain(attempt.store, "run").errors
    _, copied = Run(LocalStore(tmp_path / "far"), "run").history().live
    assert copied.id != second and copied.body.origin == second
    assert drain(attempt.store, "run").copied == [], "the copy is recognised by its origin"
    assert merge([attempt.history(), Run(LocalStore(tmp_path / "far"), "run").history()]).copies[second][1].place == 1
    begin(tmp_path)
    drain(attempt.store, "run")
    execute_sweep(plan_sweep(LocalStore(tmp_path / "far"), "run"), LocalStore(tmp_path / "far"))


def test_a_drain_that_died_before_its_note(tmp_path: Path) -> None:
    """If a drain died before its note, the next drain writes it, so that near retention releases the checkpoint."""
    attempt = begin(tmp_path)
    checkpoint = save(attempt, 0)
    drain(attempt.store, "run")
    for path in sorted((tmp_path / "near" / "run" / "log").iterdir())[-1:]:
        path.unlink()  # delete the note
    assert drained_to(attempt.__class__(attempt.place).history()) in ({}, {"far": {checkpoint}})
    fresh = Attempt.begin(attempt.store, "run")
    assert drained_to(fresh.history()) == {}
    drain(attempt.store, "run")
    assert drained_to(fresh.history()) == {"far": {checkpoint}}


def test_a_damaged_checkpoint_is_reported_and_the_next_is_copied(tmp_path: Path) -> None:
    """A damaged checkpoint is reported and not copied; a later one is copied."""
    attempt = begin(tmp_path)
    bad = save(attempt, 0)
    (pack,) = (tmp_path / "near" / "run").glob(f"*{bad}*/pack*")
    pack.write_bytes(bytes(pack.stat().st_size))
    events: list[str] = []
    drain(attempt.store, "run", notify=lambda name, message, fields: events.append(f"{name} {fields.get('kind')}"))
    assert events == [f"drain.failed {CorruptCheckpoint.kind}"]
    save(attempt, 1)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [1]


def test_residency_shows_where_everything_is(tmp_path: Path) -> None:
    """``residency`` merges the histories of all tiers, with an error for an unreadable tier."""
    attempt = begin(tmp_path, far={"warm": keep(last=1), "cold": None})
    for step in range(3):
        save(attempt, step)
        drain(attempt.store, "run")
    execute(plan_prune(attempt.store, "run", keep(last=1)), attempt.store)
    names, merged, errors = residency(attempt.store, "run")
    assert names == ["near", "warm", "cold"] and errors == [None, None, None]
    places = {
        checkpoint.step: [copy.place for copy in merged.copies[checkpoint.id]] for checkpoint in merged.history.live
    }
    assert places == {0: [2], 1: [2], 2: [0, 1, 2]}
    assert [checkpoint.step for checkpoint in merged.history.live] == [0, 1, 2]


def test_several_logs_have_one_order(tmp_path: Path) -> None:
    """With a stale near disk that returns, or a fresh one after a lost one, the newest checkpoint is the last saved
    one, without clocks."""
    old = begin(tmp_path, near="old")
    for step in (0, 1):
        save(old, step)
        drain(old.store, "run")
    new = begin(tmp_path, near="new")
    take_over(Log(LocalStore(tmp_path / "far"), "run"), fold(new.view()).fences[-1].body.attempt)  # type: ignore[union-attr]
    for step in (1, 2):  # training restarted from step 0
        save(new, step)
        drain(new.store, "run")
    far = Run(LocalStore(tmp_path / "far"), "run").history()
    steps = lambda *histories: [checkpoint.step for checkpoint in merge(histories).history.live]  # noqa: E731
    assert steps(old.history(), far) == [0, 1, 1, 2]
    assert steps(new.history(), far) == [0, 1, 1, 2]
    save(new, 3)
    save(old, 9)  # it does not know that it is superseded; the far tier refuses its copies
    assert steps(new.history(), far) == [0, 1, 1, 2, 3]
    assert steps(old.history(), far)[-1] == 2, "a save of a superseded attempt is not the newest"
    assert refuses(Fenced, lambda: (_ for _ in ()).throw(drain(old.store, "run").errors["far"]))


def test_bytes_a_second_are_bounded(tmp_path: Path) -> None:
    """A copy takes at least bytes / rate."""
    attempt = Attempt.begin(LocalStore(tmp_path / "near"), "run")
    limited = Tiers(near=str(tmp_path / "near" / "run"), far=tier(str(tmp_path / "far" / "run"), bytes_per_second=2000))
    announce(attempt.place.log, limited.tiers, attempt.epoch)
    save(attempt, 0)
    ((_, _, size, seconds),) = drain(attempt.store, "run").copied
    assert seconds >= 0.05 and size > 100


def test_a_tier_that_holds_another_run_is_refused_before_anything_is_changed_there(tmp_path: Path) -> None:
    """A tier with checkpoints of another history, trained there or copied there, is neither fenced, copied to, nor
    merged."""
    other = Attempt.begin(LocalStore(tmp_path / "far"), "run")
    save(other, 50)
    near = Attempt.begin(LocalStore(tmp_path / "near"), "run")
    save(near, 10)
    begin(tmp_path)
    assert isinstance(drain(LocalStore(tmp_path / "near"), "run").errors["far"], Fenced)
    source = Run(LocalStore(tmp_path / "far"), "run")
    execute_copy(plan_copy(source, source.history().live, LocalStore(tmp_path / "copied"), "run"))
    begin(tmp_path, far={"copied": None})
    report = drain(LocalStore(tmp_path / "near"), "run")
    assert isinstance(report.errors["copied"], ConfigError) and "holds another run" in report.errors["copied"].what
    assert live(tmp_path, "far") == live(tmp_path, "copied") == [50]
    save(other, 51)  # not fenced
    _, merged, errors = residency(LocalStore(tmp_path / "near"), "run")
    assert [checkpoint.step for checkpoint in merged.history.live] == [10] and isinstance(errors[1], ConfigError)
    with pytest.raises(ConfigError, match="holds another run"):
        read_further(
            [("far", LocalStore(tmp_path / "far"), "run")], Run(LocalStore(tmp_path / "near"), "run").history()
        )


def test_a_tier_that_a_lost_near_tier_was_restored_from_is_the_same_run(tmp_path: Path) -> None:
    """If a new near log's first save has the far tier's checkpoint as parent, the log is drained to that tier."""
    far = save(Attempt.begin(LocalStore(tmp_path / "far"), "run"), 50)
    item = Item("t", "uint8", (4,), "param", Bytes(bytes(4)), None, True)
    attempt = begin(tmp_path)
    # as a Checkpointer does before its first save
    take_over(Log(LocalStore(tmp_path / "far"), "run"), attempt.history().attempts[-1])
    attempt.save(
        SaveRequest(SaveInfo(step=60, parents=[far]), tree=encode_tree({"t": Leaf("tensor", (0,))}), items=[item])
    )
    report = drain(LocalStore(tmp_path / "near"), "run")
    assert not report.errors and live(tmp_path, "far") == [50, 60]
    near = Run(LocalStore(tmp_path / "near"), "run").history()
    assert len(read_further([("far", LocalStore(tmp_path / "far"), "run")], near)[0].history.live) == 2
