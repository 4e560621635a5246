"""Another number of ranks: ranks that the script seeded alike draw equal numbers, as ranks that share a layer must.

Others do not.
"""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from job import run

from relight.ranks.rng_groups import reseed_plan, sources


def drawn(tmp_path: Path, world: int, alike: int, writer: str, name: str = "store") -> list[dict[str, Any]]:
    """Start a job and return the numbers that each rank drew."""
    return [
        reports[0]
        for reports in run(
            "seeding.py", world, [json.dumps({"run": f"{tmp_path / name}/run", "alike": alike, "writer": writer})]
        )
    ]


@pytest.mark.distributed
@pytest.mark.parametrize("writer", ["every rank", pytest.param("rank 0", marks=pytest.mark.slow)])
def test_ranks_that_share_a_layer_draw_alike_after_a_restart(tmp_path: Path, writer: str) -> None:
    """From one pair to two pairs, to none, and back, pairs draw equal numbers and other ranks do not. Unseeded
    generators stay different."""
    seen: dict[str, list[float]] = {"torch": [], "mine": [], "python": []}
    for number, (world, alike) in enumerate([(2, 2), (4, 2), (2, 1), (4, 2), (1, 1), (2, 2)]):
        reports = drawn(tmp_path, world, alike, writer)
        assert [report["start"] for report in reports] == [number] * world
        for name in ("torch", "mine"):
            groups = [{report[name] for report in reports[first : first + alike]} for first in range(0, world, alike)]
            assert all(len(group) == 1 for group in groups) and len(set.union(*groups)) == len(groups), (
                number,
                name,
                reports,
            )
            seen[name] += [next(iter(group)) for group in groups]
        assert len({report["python"] for report in reports}) == world
        seen["python"] += [report["python"] for report in reports]
    for name, numbers in seen.items():
        assert len(set(numbers)) == len(numbers), f"{name}: no number is drawn twice"


def test_ranks_of_the_old_world_continue_and_new_ones_are_seeded() -> None:
    """Each generator is treated separately: ranks 0 and 1, and 2 and 3, share torch's seed, and Python's seed differs
    on all."""
    alike = [{"torch": "ab"[rank // 2], "python": str(rank)} for rank in range(4)]
    assert sources(alike, 2) == [
        {"torch": 0, "python": 0},
        {"torch": 0, "python": 1},
        {"torch": 0, "python": 0},
        {"torch": 0, "python": 1},
    ]
    now = [{"torch": "x", "python": "yz"[rank % 2]} for rank in range(4)]
    assert reseed_plan(alike, now) == [{}, {}, {"torch": 2, "python": 2}, {"torch": 2, "python": 3}]
    assert [source["torch"] for source in sources(alike, 3)][2:] == [2, 2]
    assert sources([], 3) == reseed_plan([], []) == []


@pytest.mark.parametrize("seed", range(50))
def test_alike_is_alike_and_nothing_else_is(seed: int) -> None:
    """For any groups before and now, two ranks draw equal numbers exactly if they are seeded alike."""
    rng = random.Random(seed)
    world, saved = rng.randrange(1, 9), rng.randrange(1, 9)
    alike = [{"torch": str(rng.randrange(4))} for _ in range(world)]
    before = [rng.randrange(3) for _ in range(saved)]
    now = [{"torch": str(before[source["torch"]])} for source in sources(alike, saved)]
    draws = [(now[rank]["torch"], seeds.get("torch")) for rank, seeds in enumerate(reseed_plan(alike, now))]
    for first in range(world):
        for second in range(world):
            assert (alike[first] == alike[second]) == (draws[first] == draws[second])
