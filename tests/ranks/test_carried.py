"""Another number of ranks: each rank's own state is carried over where possible. Otherwise a note gives the reason."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from relight.capture.rng import seed_generator
from relight.restore.elastic_state import remap_rank_state

HANDED = ("handed over: mine", "handed over: also", "handed over: third")
LOADER_NOTE = "loader starts its epoch again: its state does not record how its samples were sharded"


def parts() -> tuple[dict[str, Any], dict[str, object]]:
    components = {
        "model": torch.nn.Linear(2, 2), "loader": DataLoader(list(range(8))), "mine": torch.Generator(), "also": random.Random(0),
        "third": np.random.default_rng(0),
    }  # fmt: skip
    return {name: {} for name in (*components, "rng")}, components


def test_as_many_ranks_take_all_of_it() -> None:
    """With the same number of ranks all state is restored, without notes."""
    root, components = parts()
    result = remap_rank_state(root, components, rank=3, world=4, saved=4, key="k", own=[root] * 4)
    assert result.root is root and result.components is components and result.notes == []


def test_fewer_ranks_keep_their_generators() -> None:
    """With fewer ranks generators are kept. A loader with an unknown order starts its epoch from scratch."""
    root, components = parts()
    result = remap_rank_state(root, components, rank=1, world=2, saved=4, key="k", own=[root] * 4)
    assert set(result.root) == set(root) - {"loader"} and set(result.components) == set(components) - {"loader"}
    assert result.notes == ["4 ranks saved it, and 2 ranks continue", LOADER_NOTE]


def drawn(components: dict[str, object]) -> list[float]:
    mine, also, third = components["mine"], components["also"], components["third"]
    return [
        float(torch.rand((), generator=mine)),
        also.random(),
        float(third.random()),
        float(torch.rand(())),
        random.random(),
    ]  # type: ignore[attr-defined]


def test_ranks_that_were_not_there_draw_other_numbers() -> None:
    """New ranks draw numbers that depend on state and rank only, and differ between them.

    An old rank resumes its sequence.
    """
    numbers_of: dict[tuple[int, int], list[float]] = {}
    alike = [{name: str(source) for name in ("torch", "python", *HANDED)} for source in range(4)]
    for state, rank in ((7, 2), (7, 3), (8, 2), (7, 2), (7, 0)):
        root, components = parts()
        carried = remap_rank_state(root, components, rank=rank, world=4, saved=2, key="k", own=[root] * 2, alike=alike)
        assert {"rng", "mine", "also", "third"} <= set(carried.root) and "loader" not in carried.root
        torch.manual_seed(state + 100)  # as after a restore
        random.seed(state + 100)
        for number, name in enumerate(("mine", "also", "third")):
            seed_generator(components[name], state + number)
        carried.finish(rank, [{name: str(source % 2) for name in alike[0]} for source in range(4)])
        assert (
            carried.notes[-1] == "generators of ranks 2, 3 start again, from the positions of other ranks' generators"
        )
        numbers = drawn(components)
        assert numbers_of.setdefault((state, rank), numbers) == numbers
    assert len({number for (_, rank), numbers in numbers_of.items() if rank for number in numbers}) == 3 * 5
    assert numbers_of[7, 0][-1] == random.Random(107).random()


def test_a_loader_that_the_checkpoint_lacks_is_left_unchanged() -> None:
    """A loader that the checkpoint lacks gets a note and is no mismatch."""
    root, components = parts()
    del root["loader"]
    result = remap_rank_state(root, components, rank=0, world=1, saved=2, key="k", own=[root] * 2)
    assert (
        result.notes[1] == "loader starts its epoch again: the checkpoint has no loader of that name"
        and "loader" not in result.components
    )


@pytest.mark.parametrize(
    "state",
    [3, [], {"dealt": 3}, {"dealt": {"length": -1}}, {"dealt": {"at": "3", "length": 8}, "epochs": "many"}],
    ids=str,
)
def test_an_invalid_loader_state_is_not_restored(state: object) -> None:
    """An invalid state of a loader in a hostile tree is not restored."""
    root, components = parts()
    root["loader"] = {"counted": state}
    result = remap_rank_state(root, components, rank=0, world=1, saved=2, key="k", own=[root] * 2)
    assert "loader" not in result.root and result.notes[1].startswith("loader starts its epoch again: ")


def test_a_tree_that_is_not_a_dict_is_left_to_the_restore() -> None:
    """A tree that is not a dict is passed on unchanged; the restore refuses it."""
    assert remap_rank_state([1], {}, rank=0, world=2, saved=1, key="k", own=[]).root == [1]  # type: ignore[arg-type]
