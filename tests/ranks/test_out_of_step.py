"""If ranks have different results, or fail between two exchanges, all ranks raise, and none waits for a rank that has
left."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import relight
from relight.comm import ThreadGroup
from relight.errors import CheckpointNotFound, RelightError, SaveFailed, StoreUnavailable
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.several import SeveralRanks
from relight.restore.execute import restore_first_good
from relight.restore.request import RestoreRequest
from relight.store import LocalStore


def outcomes(size: int, action: Any) -> list[Any]:
    """Return the result or the error of ``action(ranks)`` on each rank."""

    def one(world: ThreadGroup) -> Any:
        try:
            return action(SeveralRanks(world, (), 20.0))
        except Exception as error:
            return error

    return ThreadGroup.run(size, one, 20.0)


def test_an_error_of_rank_0_is_of_the_same_kind_on_all() -> None:
    """An error of one rank is raised on every rank, so each can catch it."""

    def missing() -> bytes:
        raise CheckpointNotFound("no checkpoint has a finite loss", hint="save one")

    result = outcomes(3, lambda ranks: ranks.run_on_rank0(missing, "choosing"))
    assert [type(error) for error in result] == [CheckpointNotFound] * 3
    assert [error.hint for error in result] == ["save one"] * 3


@pytest.mark.parametrize("error", [ValueError("of the user's own"), MemoryError("none left"), StoreUnavailable("gone")])
def test_what_one_rank_raises_all_raise(error: Exception) -> None:
    """Errors that are not Relight's end the wait of other ranks too."""

    def action(ranks: SeveralRanks) -> None:
        with raise_on_all_ranks(ranks, "trying"):
            if ranks.world.rank == 1:
                raise error

    result = outcomes(3, action)
    assert result[1] is error
    kind = type(error) if isinstance(error, RelightError) else SaveFailed
    assert [type(raised) for raised in (result[0], result[2])] == [kind] * 2
    assert all(str(error).splitlines()[0] in str(raised) for raised in result)


@pytest.mark.parametrize("blind", [0, 1])
def test_a_rank_that_sees_no_run_does_not_make_all_start_from_scratch(tmp_path: Path, blind: int) -> None:
    """If a file system does not show the run to one rank yet, all ranks raise that error and none starts at step 0."""
    model = torch.nn.Linear(2, 2)
    with relight.Checkpointer(tmp_path / "store" / "run", model=model, signals=False, background=False) as ckpt:
        ckpt.save(3)
    (tmp_path / "empty").mkdir()

    def action(ranks: SeveralRanks) -> Any:
        store = LocalStore(tmp_path / ("empty" if ranks.world.rank == blind else "store"))
        return restore_first_good(RestoreRequest(store, "run", {"model": torch.nn.Linear(2, 2)}, ranks=ranks))

    result = outcomes(2, action)
    assert [type(error) for error in result] == [StoreUnavailable] * 2, result


def test_all_ranks_start_from_scratch_where_there_is_no_run(tmp_path: Path) -> None:
    """All ranks behave as a single process."""

    def action(ranks: SeveralRanks) -> Any:
        return restore_first_good(RestoreRequest(LocalStore(tmp_path), "run", {"a": 1}, ranks=ranks))

    assert [outcome.checkpoint for outcome in outcomes(2, action)] == [None, None]
