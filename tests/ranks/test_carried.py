"""Another number of ranks: what each had of its own is carried over where that has a meaning, and where not it is said."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader

from relight.capture.rng import seed_generator
from relight.checkpointer.elastic_state import remap_rank_state

HANDED = ("handed over: mine", "handed over: also", "handed over: third")
SAID = "loader begins its epoch anew: its state does not record how its samples were sharded"


def parts() -> tuple[dict[str, Any], dict[str, object]]:
    components = {
        "model": torch.nn.Linear(2, 2), "loader": DataLoader(list(range(8))), "mine": torch.Generator(), "also": random.Random(0),
        "third": np.random.default_rng(0),
    }  # fmt: skip
    return {name: {} for name in (*components, "rng")}, components


def test_as_many_ranks_take_all_of_it() -> None:
    """Nothing is left out, nothing is said."""
    root, components = parts()
    found = remap_rank_state(root, components, rank=3, world=4, saved=4, key="k", own=[root] * 4)
    assert found.root is root and found.components is components and found.notes == []


def test_fewer_ranks_keep_their_generators() -> None:
    """A loader whose order nobody knows begins anew."""
    root, components = parts()
    found = remap_rank_state(root, components, rank=1, world=2, saved=4, key="k", own=[root] * 4)
    assert set(found.root) == set(root) - {"loader"} and set(found.components) == set(components) - {"loader"}
    assert found.notes == ["4 ranks saved it and 2 ranks go on", SAID]


def drawn(components: dict[str, object]) -> list[float]:
    mine, also, third = components["mine"], components["also"], components["third"]
    return [float(torch.rand((), generator=mine)), also.random(), float(third.random()), float(torch.rand(())), random.random()]  # type: ignore[attr-defined]


def test_ranks_that_were_not_there_draw_other_numbers() -> None:
    """The same each time for the same state and rank, and different ones for each; a rank that was there goes on where it was."""
    found: dict[tuple[int, int], list[float]] = {}
    alike = [{name: str(one) for name in ("torch", "python", *HANDED)} for one in range(4)]
    for state, rank in ((7, 2), (7, 3), (8, 2), (7, 2), (7, 0)):
        root, components = parts()
        carried = remap_rank_state(root, components, rank=rank, world=4, saved=2, key="k", own=[root] * 2, alike=alike)
        assert {"rng", "mine", "also", "third"} <= set(carried.root) and "loader" not in carried.root
        torch.manual_seed(state + 100)  # as what was restored has them
        random.seed(state + 100)
        for number, name in enumerate(("mine", "also", "third")):
            seed_generator(components[name], state + number)
        carried.finish(rank, [{name: str(one % 2) for name in alike[0]} for one in range(4)])
        assert carried.notes[-1] == "generators of ranks 2, 3 begin anew, from where those of others were"
        numbers = drawn(components)
        assert found.setdefault((state, rank), numbers) == numbers
    assert len({one for (_, rank), numbers in found.items() if rank for one in numbers}) == 3 * 5
    assert found[7, 0][-1] == random.Random(107).random()


def test_a_loader_that_the_checkpoint_lacks_is_left_as_it_is() -> None:
    """It is said, and no mismatch."""
    root, components = parts()
    del root["loader"]
    found = remap_rank_state(root, components, rank=0, world=1, saved=2, key="k", own=[root] * 2)
    assert found.notes[1] == "loader begins its epoch anew: the checkpoint has no loader of that name" and "loader" not in found.components


@pytest.mark.parametrize(
    "told", [3, [], {"dealt": 3}, {"dealt": {"length": -1}}, {"dealt": {"at": "3", "length": 8}, "epochs": "many"}], ids=str
)
def test_what_no_loader_told_is_not_gone_on_with(told: object) -> None:
    """A hostile tree, again: whatever stands where a loader's state should be."""
    root, components = parts()
    root["loader"] = {"counted": told}
    found = remap_rank_state(root, components, rank=0, world=1, saved=2, key="k", own=[root] * 2)
    assert "loader" not in found.root and found.notes[1].startswith("loader begins its epoch anew: ")


def test_what_is_no_dict_is_left_to_those_who_refuse_it() -> None:
    """A hostile tree."""
    assert remap_rank_state([1], {}, rank=0, world=2, saved=1, key="k", own=[]).root == [1]  # type: ignore[arg-type]
