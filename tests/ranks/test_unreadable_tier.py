"""Ranks that cannot read the same tiers: all try the copies of rank 0, in its order."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.comm import ThreadGroup
from relight.errors import StoreUnavailable
from relight.format.records import RetireBody
from relight.log import Log, fold
from relight.ranks.several import SeveralRanks
from relight.restore.execute import restore_first_good
from relight.restore.request import RestoreRequest
from relight.store import LocalStore


class Unreachable(LocalStore):
    """A store that this rank cannot read."""

    def list(self, prefix: str) -> Any:
        raise StoreUnavailable("the host does not answer")

    def open(self, key: str) -> Any:
        raise StoreUnavailable("the host does not answer")


def save(tmp_path: Path) -> dict[int, str]:
    """Save steps 1 and 2 to both tiers, and damage the near copy of step 2. Return the ids by step."""
    tiers = relight.Tiers(near=tmp_path / "near" / "run", far=tmp_path / "far" / "run")
    with relight.Checkpointer(tiers, x=torch.zeros(4), signals=False, background=False) as ckpt:
        for step in (1, 2):
            ckpt["x"].fill_(float(step))
            ckpt.save(step).wait(60, until="drained")
    checkpoints = relight.open(tmp_path / "near" / "run").checkpoints()
    ids = {checkpoint.step: checkpoint.id for checkpoint in checkpoints}
    pack = next((tmp_path / "near" / "run").glob(f"*{ids[2]}*/pack*"))
    pack.write_bytes(bytes(byte ^ 1 for byte in pack.read_bytes()))
    return ids


def restored(tmp_path: Path, which: str, unreachable: int, other: str = "") -> list[Any]:
    """Return each rank's restored step, or its error. One rank cannot read the far tier, or has ``other`` in its place."""

    def restore(world: ThreadGroup) -> Any:
        kind = Unreachable if world.rank == unreachable and not other else LocalStore
        far = kind(tmp_path / (other if world.rank == unreachable and other else "far"))
        ranks, components = SeveralRanks(world, (), 10.0), {"x": torch.zeros(4)}
        ranks.split(components)
        request = RestoreRequest(
            LocalStore(tmp_path / "near"), "run", components, which=which, ranks=ranks, further=[("far", far, "run")]
        )
        try:
            result = restore_first_good(request)
        except relight.RelightError as error:
            return error
        assert result.checkpoint is not None and float(components["x"][0]) == result.checkpoint.step
        return result.checkpoint.step

    return ThreadGroup.run(2, restore, 10.0)


def test_all_ranks_restore_the_copy_that_all_can_read(tmp_path: Path) -> None:
    """The near copy of the newest checkpoint is damaged. If all ranks read the far tier, they restore its copy there. If
    one cannot, all restore the older checkpoint.

    Symptom: one rank tried the far copy, and the other the older checkpoint: "the ranks are out of step".
    """
    save(tmp_path)
    assert restored(tmp_path, "latest", -1) == [2, 2]
    assert restored(tmp_path, "latest", 1) == [1, 1]
    assert restored(tmp_path, "latest", 0) == [1, 1]


def test_a_copy_that_retention_removed_for_one_rank_is_left_out(tmp_path: Path) -> None:
    """Rank 1 reads the far log after rank 0, and retention has removed the copy of the newest checkpoint between the two."""
    newest = save(tmp_path)[2]
    shutil.copytree(tmp_path / "far", tmp_path / "later")
    retire = RetireBody(ids=[newest], reason="retention")
    Log(LocalStore(tmp_path / "later"), "run").append(lambda view: (retire, fold(view).epoch))
    for name in ("far", "later"):
        shutil.rmtree(next((tmp_path / name / "run").glob(f"*{newest}*")))
    assert restored(tmp_path, "latest", 1, "later") == [1, 1]


def test_a_tier_without_the_run_is_named_so(tmp_path: Path) -> None:
    """Another directory is mounted on one host: its tier answers, and has no such run."""
    newest = save(tmp_path)[2]
    (tmp_path / "empty").mkdir()
    errors = restored(tmp_path, newest, 1, "empty")
    assert all("tier far has no such run on this host" in str(error) for error in errors), errors


@pytest.mark.parametrize("rank", [0, 1])
def test_a_named_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    """All ranks raise the same kind of error, and none that the ranks are out of step."""
    kinds = [error.kind for error in restored(tmp_path, save(tmp_path)[2], rank)]
    assert kinds == (["corrupt"] * 2 if rank == 0 else ["store"] * 2), kinds
