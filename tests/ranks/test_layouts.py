"""Any shape to any shape: what is saved under one layout is restored under every other, to the bit."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from job import run

import relight
from relight.versions.difference import diff

pytestmark = pytest.mark.distributed

LAYOUTS = {
    1: ["plain"],
    2: ["ddp", "fsdp", "tensor", "columns", "flat", "flat_same", "stepped_apart"],
    3: ["ddp", "fsdp", "copies", "flat_whole", "in_line"],
    4: ["fsdp", "hsdp", "tensor_fsdp", "pipeline", "pipeline_fsdp", "grid", "cube", "flat_copies"],
}
EVERY_PAIR = "RELIGHT_TEST_EVERY_LAYOUT" in os.environ
"""``make layouts`` tries all pairs; the suite some of them."""
AT_ONCE = 40
"""Pairs that one set of processes tries."""
ALL = [f"{layout}-{world}" for world, layouts in LAYOUTS.items() for layout in layouts]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store with a run for each layout, saved twice."""
    store = tmp_path_factory.mktemp("layouts") / "store"
    for world, layouts in LAYOUTS.items():
        plan = [["save", layout, f"{store}/{layout}-{world}", {}] for layout in layouts]
        reports = run("layouts.py", world, [json.dumps(plan)])
        for number, layout in enumerate(layouts):
            ids = [reports[rank][number]["ids"] for rank in range(world)]
            assert all(id_ == ids[0] for id_ in ids), layout
    return store


@pytest.mark.parametrize("world", LAYOUTS)
@pytest.mark.timeout(1800 if EVERY_PAIR else 300)
def test_every_layout_restores_every_other(saved: Path, world: int) -> None:
    """Checkpoints of 21 layouts on one to four ranks are restored in the layouts of ``world`` ranks."""
    rng = random.Random(world)
    pairs = [(layout, name) for layout in LAYOUTS[world] for name in (ALL if EVERY_PAIR else rng.sample(ALL, 2))]
    plan = [["restore", layout, f"{saved}/{name}", {}] for layout, name in pairs]
    reports: list[list[dict[str, Any]]] = [[] for _ in range(world)]
    for begin in range(0, len(plan), AT_ONCE):
        for known, more in zip(
            reports, run("layouts.py", world, [json.dumps(plan[begin : begin + AT_ONCE])]), strict=True
        ):
            known += more
    for rank in range(world):
        assert len(reports[rank]) == len(plan)
        for report in reports[rank]:
            what = f"{report['run'].rsplit('/', 1)[1]} as {report['layout']}-{world} on rank {rank}"
            assert report["wrong"] == [], what
            assert report["start"] == 5, what
            saved_world = int(report["run"].rsplit("-", 1)[1])
            assert report["own"] == rank % saved_world, what


@pytest.mark.parametrize("name", ALL)
def test_what_several_ranks_saved_is_one_checkpoint(saved: Path, name: str) -> None:
    """The checkpoint verifies, loads as a plain tree, and has replicated bytes once."""
    run_url = saved / name
    store = relight.open(run_url)
    for _, findings in store.verify():
        assert findings == []
    tree, plain = relight.load(run_url), relight.load(saved / "plain-1")
    assert tree["model"].keys() == plain["model"].keys()
    assert all(bool((tree["model"][key] == value).all()) for key, value in plain["model"].items())
    assert tree["optimizer"]["param_groups"] == plain["optimizer"]["param_groups"]
    assert all(
        bool((tree["optimizer"]["state"][name][key] == value).all())
        for name, state in plain["optimizer"]["state"].items()
        for key, value in state.items()
    )
    sharded, whole = store.latest().body, relight.open(saved / "plain-1").latest().body
    assert sharded.logical_bytes <= 1.05 * whole.logical_bytes + 20_000 * int(name.rsplit("-", 1)[1])


@pytest.mark.parametrize("name", [name for name in ALL if name != "plain-1"])
def test_whatever_the_layout_a_diff_finds_nothing_but_the_layout(saved: Path, name: str) -> None:
    """Tensors are compared in slabs of a few elements, put together from pieces on both sides."""
    first, second = (
        run.open(run.history().live[-1])
        for run in (relight.open(saved / "plain-1").run(), relight.open(saved / name).run())
    )
    result = diff(first, second, only=["model"], slab_bytes=64)
    assert result.tensors and all(tensor.state == "same" for tensor in result.tensors), [
        tensor for tensor in result.tensors if tensor.state != "same"
    ]
