"""Branches: runs that begin with another run's checkpoint, with kills at any point and with pruning."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.catalog.branches import PREFIX
from relight.catalog.run import Run, list_runs
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, WrongKey
from relight.keys.files import write_key_file
from relight.log import fold
from relight.policy import Keep
from relight.reader import verify_checkpoint
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep, recall
from relight.store import open_bytes
from relight.testing.killable_store import Killed, Mortal
from relight.transfer import execute_copy, plan_copy
from relight.transfer.pushing import execute_push, plan_push
from relight.versions.branching import branch, branches_of, drop

Weights = list[float]


def train(url: Path, steps: int, by: float, keep: Keep | None = None) -> Weights:
    """Train a run from its newest checkpoint. Return the weights after each step."""
    weights, seen = torch.zeros(1000), []
    with relight.Checkpointer(url, weights=weights, save=relight.every(steps=1), keep=keep) as ckpt:
        start = ckpt.restore()
        for step in range(start, start + steps):
            weights += by
            ckpt.step(step, loss=float(weights[0]))
            seen.append(float(weights[0]))
    return seen


def run_at(url: Path) -> Run:
    """Open a run for reading."""
    return Run(open_bytes(url.parent), url.name)


def steps_of(run: Run) -> list[tuple[int, str]]:
    """Return step and home run of the live checkpoints."""
    return [(checkpoint.step, checkpoint.body.home) for checkpoint in run.history().live]


def sound(run: Run) -> bool:
    """Return whether all live checkpoints verify."""
    view = run.view()
    return not any(verify_checkpoint(run.store, view, checkpoint) for checkpoint in fold(view).live)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Train five steps of a run."""
    assert train(tmp_path / "s" / "base", 5, 1.0) == [1.0, 2.0, 3.0, 4.0, 5.0]
    return tmp_path / "s" / "base"


def test_a_branch_continues_from_its_checkpoint(base: Path) -> None:
    """A branch starts with that step's state under its own name. Neither run sees the other's saves."""
    made = branch(run_at(base), run_at(base).history().live[2], "other", by="me", why="try")
    assert (made.name, made.home, made.checkpoint.step, made.made) == ("other", "base", 2, True)
    assert train(base.parent / "other", 2, 10.0) == [13.0, 23.0]
    assert train(base, 1, 1.0) == [6.0]
    assert steps_of(run_at(base.parent / "other")) == [(2, "base"), (3, ""), (4, "")]
    assert [step for step, _ in steps_of(run_at(base))] == [0, 1, 2, 3, 4, 5]
    assert [(made_.name, made_.checkpoint.step) for made_ in branches_of(run_at(base))] == [("other", 2)]
    first = run_at(base.parent / "other").history().live[1]
    assert first.body.parents == [made.checkpoint.id]
    assert sound(run_at(base)) and sound(run_at(base.parent / "other"))
    assert float(relight.load(base.parent / "other", 2)["weights"][0]) == 3.0


def test_it_costs_records_and_no_bytes(base: Path) -> None:
    """A branch costs less than 10 kB, independent of the checkpoint's size."""
    branch(run_at(base), run_at(base).history().live[2], "other")
    assert sum(path.stat().st_size for path in (base.parent / "other").rglob("*") if path.is_file()) < 4096
    assert sum(len(list((base.parent / name / "log").iterdir())) for name in ("other",)) == 2


def test_the_same_branch_again_changes_nothing_and_a_run_is_not_taken_over(base: Path) -> None:
    """The same branch again changes nothing.

    A name that is used by another branch, the run itself or another run is refused.
    """
    run = run_at(base)
    first, second = run.history().live[1:3]
    assert branch(run, first, "other").made and not branch(run, first, "other").made
    records = run.view().head
    for name, checkpoint, words in (
        ("other", second, "there is a run 'other' already"),
        ("base", first, "a name of its own"),
        ("x" * 201, first, "cannot be a run"),
    ):
        with pytest.raises(ConfigError, match=words):
            branch(run, checkpoint, name)
    train(base.parent / "taken", 1, 1.0)
    with pytest.raises(ConfigError, match="there is a run 'taken' already"):
        branch(run, first, "taken")
    assert run.view().head == records


def test_what_a_branch_has_is_not_removed_and_what_it_gives_up_may_be(base: Path) -> None:
    """Retention keeps a branched checkpoint until the branch's own retention removes the tag."""
    run = run_at(base)
    branch(run, run.history().live[1], "other")
    execute(plan_prune(run.store, "base", relight.keep(last=1)), run.store)
    assert [step for step, _ in steps_of(run)] == [1, 4] and sound(run_at(base.parent / "other"))
    with pytest.raises(ConfigError, match="still has"):
        drop(run, "other")
    train(base.parent / "other", 3, 10.0, keep=relight.keep(last=2))
    assert [step for step, _ in steps_of(run_at(base.parent / "other"))] == [3, 4]
    assert not branches_of(run)
    execute(plan_prune(run.store, "base", relight.keep(last=1)), run.store)
    assert [step for step, _ in steps_of(run)] == [4] and sound(run_at(base.parent / "other"))


def test_as_long_as_it_may_be_recalled_it_is_held(base: Path) -> None:
    """After a branch retired the checkpoint it can be recalled completely. After a sweep the home run may delete it."""
    run = run_at(base)
    checkpoint = run.history().live[1]
    branch(run, checkpoint, "other")
    train(base.parent / "other", 3, 10.0)
    other = run_at(base.parent / "other")
    execute(plan_prune(run.store, "other", Keep(last=2, undo_s=3600.0)), run.store)
    assert branches_of(run) and [step for step, _ in steps_of(other)] == [3, 4]
    recall(run.store, "other", [checkpoint.id])
    assert [step for step, _ in steps_of(other)] == [1, 3, 4] and sound(other)


def test_a_branch_of_a_branch_names_the_run_with_the_bytes(base: Path) -> None:
    """The run between a run and a branch of its branch may be deleted."""
    run = run_at(base)
    branch(run, run.history().live[3], "second")
    second = run_at(base.parent / "second")
    third = branch(second, second.history().live[0], "third")
    assert third.home == "base" and [found_branch.name for found_branch in branches_of(run)] == ["second", "third"]
    import shutil

    shutil.rmtree(base.parent / "second")
    assert drop(run, "second").name == "second"
    assert train(base.parent / "third", 1, 0.5) == [4.5]


@pytest.mark.parametrize("sign", ["swapped", "gone"])
def test_a_swapped_origin_is_found_out(base: Path, sign: str) -> None:
    """A changed root is detected, because the branch's own log has its hash."""
    run = run_at(base)
    checkpoint = run.history().live[2]
    branch(run, checkpoint, "other")
    root = base / checkpoint.body.dir / "root.json"
    if sign == "gone":
        root.unlink()
    else:
        root.write_bytes((base / run.history().live[1].body.dir / "root.json").read_bytes())
    with pytest.raises(CorruptCheckpoint):
        run_at(base.parent / "other").open(run_at(base.parent / "other").history().live[0])


def test_killed_anywhere_it_keeps_too_much_and_never_too_little(base: Path) -> None:
    """A kill before any change leaves at most a tag without a branch. A repeated branch completes it."""
    ends = 0
    for left in range(40):
        store, name = Mortal(open_bytes(base.parent), left), f"branch{left}"
        run = Run(store, "base")
        checkpoint = run.history().live[2]
        try:
            branch(run, checkpoint, name)
        except Killed:
            ends += 1
            assert name not in list_runs(store) or not Run(store, name).history().live
        else:
            break
        store.left = -1
        assert branch(run, checkpoint, name).made
        assert f"{PREFIX}{name}" in run.history().tags and Run(store, name).history().live[0].id == checkpoint.id
    assert ends >= 3 and left < 39
    execute(plan_prune(run.store, "base", relight.keep(last=1)), open_bytes(base.parent))
    assert all(sound(run_at(base.parent / name)) for name in list_runs(run.store))


def test_giving_up_is_safe_wherever_it_ends(base: Path) -> None:
    """If a branch's pruning is killed before any change, the tag exists as long as the branch needs it, and is removed
    in the end."""
    run = run_at(base)
    for left in range(12):
        name = f"b{left}"
        branch(run, run.history().live[1], name)
        train(base.parent / name, 3, 1.0)
        store = Mortal(open_bytes(base.parent), left)
        try:
            execute(plan_prune(store, name, relight.keep(last=1)), store)
        except Killed:
            pass
        assert sound(run_at(base.parent / name))
        has = [checkpoint for checkpoint in run_at(base.parent / name).history().live if checkpoint.body.home]
        assert not has or f"{PREFIX}{name}" in run.history().tags
        store.left = -1
        execute(plan_prune(store, name, relight.keep(last=1)), store)
        execute_sweep(plan_sweep(store, name), store)
        assert f"{PREFIX}{name}" not in run.history().tags and len(run_at(base.parent / name).history().live) == 1


def test_a_damaged_log_of_a_branch_lets_nothing_go(base: Path) -> None:
    """An unreadable record may name the branch's checkpoint, so the tag is kept."""
    run = run_at(base)
    branch(run, run.history().live[1], "other")
    record = base.parent / "other" / "log" / sorted(path.name for path in (base.parent / "other" / "log").iterdir())[1]
    record.write_bytes(record.read_bytes()[:-9])
    with pytest.raises(ConfigError):
        drop(run, "other")
    assert branches_of(run)


def test_copies_of_a_branch_stand_by_themselves(base: Path, tmp_path: Path) -> None:
    """A copy of a branch in another store does not need the home run."""
    run = run_at(base)
    branch(run, run.history().live[2], "other")
    train(base.parent / "other", 1, 10.0)
    other = run_at(base.parent / "other")
    target = open_bytes(tmp_path / "far")
    execute_copy(plan_copy(other, other.history().live, target, "other"))
    assert [home for _, home in steps_of(Run(target, "other"))] == ["", ""] and sound(Run(target, "other"))
    assert not plan_copy(other, other.history().live, target, "other").checkpoints
    run.tag("good", run.history().live[2].id)
    pushed = execute_push(plan_push(run, target, "base"))
    assert [name for name, _ in pushed.tagged] == ["good"] and not branches_of(Run(target, "base"))


def test_a_checkpoint_that_needs_others_is_branched_off_with_them(tmp_path: Path) -> None:
    """A checkpoint that needs donors' bytes keeps its donors in the home run."""
    url = tmp_path / "s" / "base"
    frozen, moving = torch.arange(300_000.0), torch.zeros(300_000)
    options: dict[str, Any] = {"compact": relight.Compact(codecs="always", full_every=50)}
    with relight.Checkpointer(url, frozen=frozen, moving=moving, save=relight.every(steps=1), **options) as ckpt:
        ckpt.restore()
        for step in range(4):
            moving += 1
            ckpt.step(step)
    run = run_at(url)
    checkpoint = run.history().live[-1]
    assert checkpoint.requires
    branch(run, checkpoint, "other")
    execute(plan_prune(run.store, "base", relight.keep(last=1)), run.store)
    with relight.Checkpointer(
        tmp_path / "s" / "other", frozen=frozen, moving=moving, save=relight.every(steps=1), **options
    ) as ckpt:
        frozen.zero_(), moving.zero_()
        assert ckpt.restore() == 4 and float(moving[0]) == 4.0 and float(frozen[7]) == 7.0
        for step in (4, 5):
            moving += 1
            ckpt.step(step)
    assert sound(run_at(tmp_path / "s" / "other")) and sound(run)


def test_it_takes_no_longer_for_a_larger_one(tmp_path: Path) -> None:
    """Reads and writes are counted: the same files and bytes for 64 MiB and for 64 kB."""
    from relight.testing.counting import CountingStore

    counts = []
    for elements in (1 << 14, 1 << 24):
        url = tmp_path / str(elements) / "run"
        relight.save(url, {"weights": torch.zeros(elements)}, step=1)
        store = CountingStore(open_bytes(url.parent))
        run = Run(store, "run")
        started = time.perf_counter()
        branch(run, run.history().live[0], "other")
        assert time.perf_counter() - started < 5
        counts.append(store.asked)
        assert store.through < 10_000
    assert counts[0] == counts[1]


def test_a_branch_s_tag_cannot_be_changed_by_hand(base: Path) -> None:
    """A branch's tag can be neither moved nor deleted by hand, because the branch needs it."""
    run = run_at(base)
    branch(run, run.history().live[1], "other")
    for target in (None, run.history().live[0].id):
        with pytest.raises(ConfigError, match="hold what branches need"):
            run.tag(f"{PREFIX}other", target)
    with pytest.raises(CheckpointNotFound, match="has no branch"):
        drop(run, "unknown")
    with (
        pytest.raises(ConfigError, match="hold what branches need"),
        relight.Checkpointer(base, save=None, weights=torch.zeros(1000)) as ckpt,
    ):
        ckpt.restore()
        ckpt.save(9, tag=f"{PREFIX}mine")


def test_in_an_encrypted_store(tmp_path: Path) -> None:
    """The branch's checkpoint opens with the same key, and only with it."""
    write_key_file(str(tmp_path / "key"))
    options: dict[str, Any] = {"encrypt": f"file:{tmp_path / 'key'}"}
    url, weights = tmp_path / "s" / "base", torch.zeros(1000)
    with relight.Checkpointer(url, weights=weights, save=relight.every(steps=1), **options) as ckpt:
        for step in range(ckpt.restore(), 2):
            weights += 1
            ckpt.step(step)
    relight.open(url, **options).branch("other", 0)
    weights.zero_()
    with relight.Checkpointer(
        tmp_path / "s" / "other", weights=weights, save=relight.every(steps=1), **options
    ) as ckpt:
        assert ckpt.restore() == 1 and float(weights[0]) == 1.0
        ckpt.step(1)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "s" / "other", **options).checkpoints()] == [0, 1]
    with pytest.raises(WrongKey):
        relight.open(tmp_path / "s" / "other").checkpoints()
