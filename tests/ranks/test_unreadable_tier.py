"""Ranks that cannot read the same tiers: all try the copies of rank 0, in its order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.comm import ThreadGroup
from relight.errors import StoreUnavailable
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


def restored(tmp_path: Path, which: str, unreachable: int) -> list[Any]:
    """Return each rank's restored step, or its error. One rank cannot read the far tier."""

    def restore(world: ThreadGroup) -> Any:
        far = (Unreachable if world.rank == unreachable else LocalStore)(tmp_path / "far")
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


@pytest.mark.parametrize("rank", [0, 1])
def test_a_named_checkpoint_that_one_rank_cannot_read_is_an_error_on_all(tmp_path: Path, rank: int) -> None:
    """All ranks raise the same kind of error, and none that the ranks are out of step."""
    kinds = [error.kind for error in restored(tmp_path, save(tmp_path)[2], rank)]
    assert kinds == (["corrupt"] * 2 if rank == 0 else ["store"] * 2), kinds
