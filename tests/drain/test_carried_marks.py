"""Tags and holds of the nearest tier on further tiers: carried with a copy and after it, kept by retention there, removed
when they are removed."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tests.drain.test_drain import begin, live
from tests.log.test_far_logs import Far
from tests.log.test_log_stale_listings import save

import relight
from relight.catalog import Run
from relight.catalog.tiers import announce
from relight.cli import cli
from relight.commit import Attempt
from relight.drain import carried_marks, drain
from relight.drain.carried_marks import carry_marks
from relight.errors import StoreUnavailable
from relight.format.topics import CARRIED, COPIED
from relight.log import History, Log, fold
from relight.policy import Tiers, keep, tier
from relight.reclaim import plan_prune
from relight.run_records.holds import hold, holds_of, release
from relight.store import LocalStore
from relight.versions.stages import clear, promote


def far_history(folder: Path) -> History:
    """Return the far run's history, as its own log states it."""
    return Run(LocalStore(folder / "far"), "run").history()


def near_run(attempt: Attempt) -> Run:
    return Run(attempt.store, "run")


def tags(folder: Path) -> dict[str, int]:
    """Return the step of each tag on the far tier."""
    history = far_history(folder)
    return {name: history.by_id[target].step for name, target in history.tags.items()}


def test_a_saved_tag_stays_on_the_far_tier(tmp_path: Path) -> None:
    """``save(tag=)`` protects the copy against the far rules, and the far store alone restores it by its tag."""
    model = torch.nn.Linear(4, 4)
    tiers = relight.Tiers(
        near=relight.tier(str(tmp_path / "near" / "demo"), keep=relight.keep(last=2)),
        far=relight.tier(str(tmp_path / "far" / "demo"), keep=relight.keep(last=1, every=1000)),
    )
    with relight.Checkpointer(tiers, model=model, save=relight.every(steps=10), background=False) as ckpt:
        for step in range(ckpt.restore(), 60):
            ckpt.step(step)
            if step == 24:
                with torch.no_grad():
                    model.weight.fill_(24.0)
                ckpt.save(24, tag="gold")
                with torch.no_grad():
                    model.weight.fill_(0.0)
    far = Run(LocalStore(tmp_path / "far"), "demo").history()
    assert [checkpoint.step for checkpoint in far.live] == [24, 59]
    (tmp_path / "near").rename(tmp_path / "lost")
    other = torch.nn.Linear(4, 4)
    with relight.Checkpointer(str(tmp_path / "far" / "demo"), model=other, background=False) as ckpt:
        assert ckpt.restore("gold") == 25
    assert bool((other.weight == 24.0).all())


def test_a_later_tag_is_carried_with_the_next_copy_and_its_removal_too(tmp_path: Path) -> None:
    """A tag that ``relight tag`` gives a copied checkpoint holds there from the next copy on, until it is removed."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    for step in (1, 2):
        save(attempt, step)
        drain(attempt.store, "run")
    place = str(tmp_path / "near" / "run")
    assert CliRunner().invoke(cli, ["tag", f"{place}@2", "fav"]).exit_code == 0
    save(attempt, 3)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [2, 3] and tags(tmp_path) == {"fav": 2}
    assert CliRunner().invoke(cli, ["tag", place, "fav", "--delete"]).exit_code == 0
    drain(attempt.store, "run")
    assert tags(tmp_path) == {}
    save(attempt, 4)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [4]


def test_a_moved_tag_moves(tmp_path: Path) -> None:
    """The far tag follows to a checkpoint that the tier has, and ends if it moves to one that the tier never gets."""
    attempt = begin(tmp_path)
    ids = []
    for step in range(4):
        ids.append(save(attempt, step))
        if step != 1:
            drain(attempt.store, "run")
    near = near_run(attempt)
    for target, expected in ((0, 0), (2, 2), (1, None), (3, 3)):
        near.tag("best-yet", ids[target])
        drain(attempt.store, "run")
        assert tags(tmp_path) == ({} if expected is None else {"best-yet": expected})


def test_a_hold_and_a_stage_are_carried(tmp_path: Path) -> None:
    """A hold makes the far tier get the checkpoint and keep it, with the reason; a stage counts as a tag."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    ids = [save(attempt, step) for step in range(4)]
    near = near_run(attempt)
    hold(attempt.store, "run", ids[1], "incident 42")
    promote(near, near.history().by_id[ids[2]], "production", why="it won", by="anna")
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [1, 2, 3] and tags(tmp_path) == {"production": 2}
    assert holds_of(far_history(tmp_path)) == {ids[1]: "incident 42"}
    moved = Log(LocalStore(tmp_path / "far"), "run").read().records
    assert [record.body.why for record in moved if record.kind == "TAG"] == ["it won"]
    release(attempt.store, "run", ids[1])
    clear(near, "production")
    save(attempt, 4)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [4] and not tags(tmp_path) and not holds_of(far_history(tmp_path))


def test_a_hold_is_carried_once_by_several_processes(tmp_path: Path) -> None:
    """Two processes that read the far log before either has carried a hold write it once, so that it is removed later."""
    attempt = begin(tmp_path, far={"far": keep(last=3)})
    ids = [save(attempt, step) for step in range(2)]
    drain(attempt.store, "run")
    near, log = near_run(attempt), Log(LocalStore(tmp_path / "far"), "run")
    far = fold(log.read())
    hold(attempt.store, "run", ids[1], "incident 42")
    for _ in range(2):
        carry_marks(near.view(), far, "far", Log(attempt.store, "run"), log, far.epoch)
    assert holds_of(far_history(tmp_path)) == {ids[1]: "incident 42"}
    release(attempt.store, "run", ids[1])
    save(attempt, 2)
    drain(attempt.store, "run")
    assert holds_of(far_history(tmp_path)) == {}


def test_a_user_s_mark_on_the_far_tier_stays(tmp_path: Path) -> None:
    """A far tag that has the same name stays on its checkpoint, and both checkpoints stay."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    ids = []
    for step in (0, 1):
        ids.append(save(attempt, step))
        if step == 0:
            drain(attempt.store, "run")
            Run(LocalStore(tmp_path / "far"), "run").tag("gold", ids[0])
            hold(LocalStore(tmp_path / "far"), "run", ids[0], "audit")
    near = near_run(attempt)
    near.tag("gold", ids[1])
    hold(attempt.store, "run", ids[0], "mine")
    for step in (2, 3):
        save(attempt, step)
        drain(attempt.store, "run")
    assert live(tmp_path, "far") == [0, 1, 3] and tags(tmp_path) == {"gold": 0}
    near.tag("gold", None)
    release(attempt.store, "run", ids[0])
    save(attempt, 4)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [0, 4] and tags(tmp_path) == {"gold": 0}
    assert holds_of(far_history(tmp_path)) == {ids[0]: "audit"}


@pytest.mark.parametrize(("why", "is_released_first"), [("audit", True), ("audit", False), ("mine", False)])
def test_a_hold_that_a_user_places_on_a_held_copy_stays(tmp_path: Path, why: str, is_released_first: bool) -> None:
    """A user holds a far copy that already has a carried hold. The release in the nearest tier does not release it."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    ids = [save(attempt, step) for step in (0, 1)]
    hold(attempt.store, "run", ids[0], "mine")
    drain(attempt.store, "run")
    assert holds_of(far_history(tmp_path)) == {ids[0]: "mine"}
    far = LocalStore(tmp_path / "far")
    if is_released_first:
        release(far, "run", ids[0])
    hold(far, "run", ids[0], why)
    release(attempt.store, "run", ids[0])
    for step in (2, 3):
        save(attempt, step)
        drain(attempt.store, "run")
    assert holds_of(far_history(tmp_path)) == {ids[0]: why} and live(tmp_path, "far") == [0, 3]
    release(far, "run", ids[0])
    hold(attempt.store, "run", ids[1], "again")
    save(attempt, 4)
    drain(attempt.store, "run")
    assert holds_of(far_history(tmp_path)) == {}, "checkpoint 1 has no copy there"


def test_a_lost_or_damaged_near_log_removes_nothing(tmp_path: Path) -> None:
    """A new nearest tier has no tags: those of the far tier stay. A damaged TAG record is no removal."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    first = save(attempt, 0)
    near_run(attempt).tag("gold", first)
    drain(attempt.store, "run")
    (record,) = [record for record in attempt.view().records if record.kind == "TAG"]
    (file,) = (tmp_path / "near" / "run" / "log").rglob(f"*{record.seq}.json")
    file.write_bytes(b"x" * file.stat().st_size)
    save(attempt, 1)
    drain(Attempt(attempt.place).store, "run")
    assert near_run(attempt).history().tags == {} and tags(tmp_path) == {"gold": 0}
    assert live(tmp_path, "far") == [0, 1]


@pytest.mark.parametrize("broken", ["between the two records", "before the first"])
def test_an_interrupted_carry_deletes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """If the far tag cannot be written, retention there waits. The next drain writes it once."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    ids = [save(attempt, 0)]
    drain(attempt.store, "run")
    near_run(attempt).tag("gold", ids[0])
    save(attempt, 1)

    def fails(*arguments: object) -> tuple[object, int]:
        raise StoreUnavailable("no answer", where="far")

    events = list[str]()
    if broken == "between the two records":
        monkeypatch.setattr(carried_marks, "_by_owner", fails)
    else:
        monkeypatch.setattr(CARRIED, "note", fails)
    drain(attempt.store, "run", notify=lambda name, message, fields: events.append(name))
    assert "prune.failed" in events and live(tmp_path, "far") == [0, 1]
    monkeypatch.undo()
    save(attempt, 2)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [0, 2] and tags(tmp_path) == {"gold": 0}
    heads = [Log(LocalStore(tmp_path / name), "run").read().head for name in ("near", "far")]
    drain(attempt.store, "run")
    assert [Log(LocalStore(tmp_path / name), "run").read().head for name in ("near", "far")] == heads


def test_a_tag_that_moves_while_the_far_write_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The far tag still is on the earlier checkpoint, and counts as carried: it moves at the next drain, and is cleared."""
    attempt = begin(tmp_path)
    ids = []
    for step in range(3):
        ids.append(save(attempt, step))
        drain(attempt.store, "run")
    near = near_run(attempt)
    near.tag("top", ids[0])
    drain(attempt.store, "run")
    assert tags(tmp_path) == {"top": 0}

    def fails(*arguments: object) -> tuple[object, int]:
        raise StoreUnavailable("no answer", where="far")

    def drain_without_far() -> None:
        with monkeypatch.context() as patch:
            patch.setattr(carried_marks, "_by_owner", fails)
            drain(attempt.store, "run")

    near.tag("top", ids[1])
    drain_without_far()
    assert tags(tmp_path) == {"top": 0}
    drain(attempt.store, "run")
    assert tags(tmp_path) == {"top": 1}
    near.tag("top", ids[2])
    drain_without_far()
    near.tag("top", None)
    drain(attempt.store, "run")
    assert tags(tmp_path) == {}


def test_a_tag_that_comes_while_the_plan_is_made_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Far retention reads a whole checkpoint first. A tag from that time protects."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    first = save(attempt, 0)
    drain(attempt.store, "run")

    def slow(*arguments: object, **options: object) -> object:
        plan = plan_prune(*arguments, **options)  # type: ignore[arg-type]
        near_run(attempt).tag("gold", first)
        return plan

    monkeypatch.setattr("relight.drain.outwards.plan_prune", slow)
    save(attempt, 1)
    drain(attempt.store, "run")
    assert live(tmp_path, "far") == [0, 1] and tags(tmp_path) == {"gold": 0}


def test_only_the_node_of_rank_0_carries(tmp_path: Path) -> None:
    """The other nodes of a job copy, and change neither tags nor retention of the tier."""
    attempt = begin(tmp_path, far={"far": keep(last=1)})
    for step in (0, 1):
        near_run(attempt).tag(f"t{step}", save(attempt, step))
    drain(attempt.store, "run", ranks=frozenset({1}))
    assert live(tmp_path, "far") == [0, 1] and tags(tmp_path) == {}
    drain(attempt.store, "run", ranks=frozenset({0}))
    assert tags(tmp_path) == {"t0": 0, "t1": 1}


def test_known_tags_cost_no_request(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drain with carried tags lists and writes what a drain without tags does, on both tiers."""
    costs = []
    for tagged in (False, True):
        near, far = Far(), Far()
        attempt = Attempt.begin(near, "run")
        tiers = Tiers(near="memory://near/run", far=tier("memory://far/run", keep=keep(last=2)))
        announce(attempt.place.log, tiers.tiers, attempt.epoch)
        monkeypatch.setattr("relight.drain.outwards.open_tier", lambda tier, guard, far=far: (far, "run"))
        for step in range(6):
            checkpoint = save(attempt, step)
            drain(near, "run")
            if step == 1 and tagged:
                Run(near, "run").tag("gold", checkpoint)
        for store in (near, far):
            store.lists.clear()
        heads = [Log(store, "run").read().head for store in (near, far)]
        for store in (near, far):
            store.lists.clear()
        save(attempt, 6)
        drain(near, "run")
        lists = [sum(store.lists.values()) for store in (near, far)]
        costs.append((lists, [Log(store, "run").read().head - head for store, head in zip((near, far), heads)]))
    assert costs[0] == costs[1]
    assert sum(1 for _ in COPIED.among(attempt.history().notes)) == 7
