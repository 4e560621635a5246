"""A branch, or a resumed run, does not store again what the checkpoint before its first save has."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from torch import nn

import relight
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, UnsafeContent
from relight.format.manifest import (
    OTHER_RUNS,
    STORED_CHUNKS,
    Part,
    PartRef,
    check_part,
    decode_part,
    encode_part,
    storing,
)
from relight.format.names import parse_home
from relight.log import Checkpoint
from relight.run_records.verification import record_checked
from relight.store import open_bytes

BASE = 1500
"""9 MB of parameters that nothing trains; three small matrices and their moments are."""


def parts(*, frozen: bool = True, seed: int = 0) -> dict[str, Any]:
    torch.manual_seed(seed)
    model = nn.ModuleList([nn.Linear(BASE, BASE, bias=False).requires_grad_(not frozen), nn.Linear(40, 40, bias=False)])
    return {
        "model": model,
        "optimizer": torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad]),
    }


def train(
    where: Path, until: int, made: dict[str, Any], *, background: bool = False, **options: Any
) -> dict[str, torch.Tensor]:
    """Resume a run, train up to that step with a save after each, and return the last state."""
    model, optimizer = made["model"], made["optimizer"]
    with relight.Checkpointer(
        where,
        save=relight.every(steps=1),
        compact=relight.Compact(codecs="never"),
        background=background,
        limits=relight.Limits(when_busy="queue"),
        **options,
        **made,
    ) as ckpt:
        for step in range(ckpt.restore(), until):
            optimizer.zero_grad()
            loss = sum(
                (torch.randn(2, layer.in_features) @ layer.weight).square().mean()
                for layer in model
                if layer.weight.requires_grad
            )
            loss.backward()
            optimizer.step()
            ckpt.step(step)
    return {name: value.clone() for name, value in model.state_dict().items()}


def live(run: Path) -> list[Checkpoint]:
    """A run's checkpoints."""
    return relight.open(run).checkpoints()


def root_of(run: Path, checkpoint: Checkpoint) -> Any:
    """Return the checkpoint's root."""
    return Run(open_bytes(str(run.parent)), run.name).open(checkpoint).root


@pytest.fixture
def branched(tmp_path: Path) -> Path:
    """A store with a run of three saves, and another that branched off its last one."""
    train(tmp_path / "s/parent", 3, parts())
    relight.open(tmp_path / "s/parent").branch("branch")
    return tmp_path / "s"


@pytest.mark.parametrize("background", [False, True], ids=["itself", "by an agent"])
def test_a_branch_stores_what_it_trains(branched: Path, background: bool) -> None:
    """From the first save on, the base is stored only with the parent's checkpoint.

    The root names it, and a restore is exact.
    """
    first = live(branched / "parent")[-1]
    assert first.body.requires  # its base is stored with an earlier checkpoint
    state = train(branched / "branch", 6, parts(seed=1), background=background)
    home, *own = live(branched / "branch")
    assert (home.id, home.body.home, len(own)) == (first.id, "parent", 3)
    for checkpoint in own:
        assert set(checkpoint.body.requires) >= {first.id, *first.body.requires}
        assert checkpoint.body.new_bytes < 0.02 * checkpoint.body.logical_bytes, (
            checkpoint.body.new_bytes,
            checkpoint.body.logical_bytes,
        )
        assert root_of(branched / "branch", checkpoint).features == [STORED_CHUNKS, OTHER_RUNS]
    assert not [findings for _, findings in relight.open(branched / "branch").verify() if findings]
    fresh = parts(seed=2)
    with relight.Checkpointer(branched / "branch", save=None, background=False, **fresh) as ckpt:
        assert ckpt.restore() == 6
    assert all(torch.equal(value, state[name]) for name, value in fresh["model"].state_dict().items())


def test_a_resumed_run_stores_only_what_it_trains(tmp_path: Path) -> None:
    """The first save of an attempt reuses what an earlier attempt of the same run stored. It names no other run."""
    train(tmp_path / "s/run", 3, parts())
    state = train(tmp_path / "s/run", 5, parts(seed=1))
    *_, third, fourth, fifth = live(tmp_path / "s/run")
    for checkpoint in (fourth, fifth):
        assert checkpoint.body.new_bytes < 0.02 * checkpoint.body.logical_bytes
        assert root_of(tmp_path / "s/run", checkpoint).features == [STORED_CHUNKS]
        assert third.id not in checkpoint.body.requires  # it stores nothing of the base itself
    fresh = parts(seed=2)
    with relight.Checkpointer(tmp_path / "s/run", save=None, background=False, **fresh) as ckpt:
        assert ckpt.restore() == 5
    assert all(torch.equal(value, state[name]) for name, value in fresh["model"].state_dict().items())


def test_a_branch_in_which_everything_changes_has_plain_files(tmp_path: Path) -> None:
    """If all tensors of a branch change, its files are plain safetensors."""
    train(tmp_path / "s/parent", 2, parts(frozen=False))
    relight.open(tmp_path / "s/parent").branch("branch")
    train(tmp_path / "s/branch", 4, parts(frozen=False, seed=1))
    for checkpoint in live(tmp_path / "s/branch")[1:]:
        root = root_of(tmp_path / "s/branch", checkpoint)
        assert root.features == [], root.user
        assert checkpoint.body.requires == []


def test_chunks_that_the_branch_needs_are_kept(branched: Path) -> None:
    """Chunks of the parent stay while the branch needs them, and go afterwards, whatever deletes checkpoints: the
    parent's retention, the branch's own retention, or the deletion of the branch."""
    *_, first = live(branched / "parent")
    train(branched / "branch", 6, parts(seed=1), keep=relight.keep(last=1))
    train(branched / "parent", 6, parts(), keep=relight.keep(last=1))
    assert {first.id, *first.body.requires} <= {checkpoint.id for checkpoint in live(branched / "parent")}
    branch_checkpoints = live(branched / "branch")
    assert [checkpoint.id for checkpoint in branch_checkpoints][0] == first.id  # a donor is kept
    assert len(branch_checkpoints) == 2
    with pytest.raises(ConfigError, match="still has"):
        from relight.versions.branching import drop

        drop(Run(open_bytes(str(branched)), "parent"), "branch")
    assert not [findings for _, findings in relight.open(branched / "branch").verify() if findings]

    from relight.transfer.repack import execute_repack, plan_repack

    parent = Run(open_bytes(str(branched)), "parent")
    assert execute_repack(plan_repack(parent, [first.id])).freed == []  # the branch needs the chunks of the same donor
    relight.open(branched / "parent").prune(relight.keep(last=1))
    assert not [findings for _, findings in relight.open(branched / "branch").verify() if findings]
    run = Run(open_bytes(str(branched)), "branch")
    assert first.id in execute_repack(plan_repack(run)).freed
    relight.open(branched / "branch").prune(relight.keep(last=1))
    assert [checkpoint.id for checkpoint in live(branched / "branch")] == [branch_checkpoints[-1].id]
    relight.open(branched / "parent").prune(relight.keep(last=1))
    *donors, newest = live(branched / "parent")
    assert first.id not in [checkpoint.id for checkpoint in donors]
    assert {checkpoint.id for checkpoint in donors} <= set(newest.body.requires)
    assert not [findings for _, findings in relight.open(branched / "branch").verify() if findings]


def test_a_branch_of_a_branch(branched: Path) -> None:
    """Chunks that the parent has from a third run are stored again, because no process would keep them for this run."""
    train(branched / "branch", 5, parts(seed=1))
    relight.open(branched / "branch").branch("twig")
    state = train(branched / "twig", 8, parts(seed=2))
    home, *own = live(branched / "twig")
    assert home.body.home == "branch"
    assert own[0].body.new_bytes > 0.9 * own[0].body.logical_bytes
    assert own[-1].body.new_bytes < 0.02 * own[-1].body.logical_bytes
    fresh = parts(seed=3)
    with relight.Checkpointer(branched / "twig", save=None, background=False, **fresh) as ckpt:
        assert ckpt.restore() == 8
    assert all(torch.equal(value, state[name]) for name, value in fresh["model"].state_dict().items())


def test_a_copy_stands_by_itself(branched: Path, tmp_path: Path) -> None:
    """A copy in another store has all bytes and names no other run."""
    state = train(branched / "branch", 5, parts(seed=1))
    copied = subprocess.run(
        [sys.executable, "-m", "relight", "cp", f"{branched}/branch@latest", str(tmp_path / "t/run")],
        capture_output=True,
        text=True,
    )
    assert copied.returncode == 0, copied.stderr
    shutil.rmtree(branched)
    (copy,) = live(tmp_path / "t/run")
    assert copy.body.requires == []
    assert OTHER_RUNS not in root_of(tmp_path / "t/run", copy).features
    loaded = relight.load(tmp_path / "t/run")
    assert all(torch.equal(value, state[name]) for name, value in loaded["model"].items())


def test_a_parent_that_was_removed_by_hand_is_reported(branched: Path) -> None:
    """``rm -r`` of chunks that another run needs is reported as damage that names the run."""
    train(branched / "branch", 4, parts(seed=1))
    for path in (branched / "parent").glob("00*"):
        shutil.rmtree(path)
    with pytest.raises(CorruptCheckpoint, match="parent/"):
        relight.load(branched / "branch", "latest")


def test_a_damaged_parent_is_no_reason_not_to_save(branched: Path) -> None:
    """A root or part that cannot be read is not made use of: everything is stored."""
    first = live(branched / "parent")[-1]
    with relight.Checkpointer(
        branched / "branch", save=None, compact=relight.Compact(), background=False, **(made := parts(seed=1))
    ) as ckpt:
        assert ckpt.restore() == 3
        part = next((branched / "parent").glob(f"*{first.id}*/part-*"))
        part.write_bytes(part.read_bytes()[:-1])
        assert ckpt.save(3).done
    newest = live(branched / "branch")[-1]
    assert (newest.body.requires, root_of(branched / "branch", newest).features) == ([], [])
    assert made


@pytest.mark.parametrize(
    "directory",
    ["../parent/{}", "log/{}", "a/b/{}", "/{}", "{}/", "parent/", "parent/..", "./{}", "par ent/{}", ".hidden/{}"],
)
def test_invalid_directories_of_a_donor(branched: Path, directory: str) -> None:
    """Names that lead out of the store, or to no run in it, are refused before a file is opened."""
    train(branched / "branch", 4, parts(seed=1))
    run = Run(open_bytes(str(branched)), "branch")
    opened = run.open(live(branched / "branch")[-1])
    (part,) = opened.parts
    (pack,) = part.packs
    assert pack.stored is not None
    home, file = pack.stored.homes[0]
    assert home.startswith("parent/")
    assert parse_home(directory.format(home.partition("/")[2])) is None
    moved = msgspec.structs.replace(
        pack.stored, homes=[(directory.format(home.partition("/")[2]), file), *pack.stored.homes[1:]]
    )
    wrong = msgspec.structs.replace(part, packs=[msgspec.structs.replace(pack, stored=moved)])
    with pytest.raises(UnsafeContent):
        check_part(wrong, "here")


def test_a_root_without_the_feature_of_foreign_chunks(branched: Path) -> None:
    """A root with chunks of another run must have the feature that makes older readers refuse it, because they search
    only their own run.

    Without the feature the part is refused.
    """
    train(branched / "branch", 4, parts(seed=1))
    opened = Run(open_bytes(str(branched)), "branch").open(live(branched / "branch")[-1])
    (part,) = opened.parts
    assert storing(part.packs) == [STORED_CHUNKS, OTHER_RUNS]
    data = encode_part(part)
    ref: PartRef = opened.root.parts[0]
    assert isinstance(decode_part(data, opened.root, ref, "here"), Part)
    with pytest.raises(UnsafeContent, match="another run"):
        decode_part(data, msgspec.structs.replace(opened.root, features=[STORED_CHUNKS]), ref, "here")
    with pytest.raises(CheckpointNotFound):
        relight.load(branched / "nowhere")


def test_a_branch_does_not_build_on_what_was_found_damaged_in_its_home(tmp_path: Path) -> None:
    """Damage that the log of the home run records counts for the branch, too: its first save stores everything."""
    train(tmp_path / "a", 2, parts())
    origin = relight.open(tmp_path / "a").latest()
    for name in ("sound", "damaged"):
        relight.open(tmp_path / "a").branch(name)
        if name == "damaged":
            record_checked(open_bytes(tmp_path), "a", {origin.id: "a chunk is damaged"}, "relight verify")
        train(tmp_path / name, 3, parts())
    assert origin.id in relight.open(tmp_path / "sound").latest().requires
    assert relight.open(tmp_path / "damaged").latest().requires == []
