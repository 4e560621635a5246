"""Saved through torch.distributed.checkpoint under one layout, loaded under another, on one and two ranks of gloo."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from job import run

import relight
from relight.integrations import dcp

pytestmark = pytest.mark.distributed

SCRIPT = str(Path(__file__).parent / "dcp_ranks.py")
PAIR = ("ddp", "fsdp", "tensor")
ALL = ("plain-1", *(f"{layout}-2" for layout in PAIR))


def job(world: int, plan: list[list[Any]]) -> list[list[dict[str, Any]]]:
    return run(SCRIPT, world, [json.dumps(plan)], seconds=120)


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Everything that two ranks do, in one job: saves, a save that fails, loads of all under other layouts, damage in between."""
    store = tmp_path_factory.mktemp("dcp")
    job(
        1,
        [
            ["save", "plain", f"{store}/plain-1", {"steps": [3, 4]}],
            ["save", "plain", f"{store}/native-plain-1", {"steps": [4], "native": True}],
        ],
    )
    plan: list[list[Any]] = [["save", layout, f"{store}/{layout}-2", {"steps": [3, 4]}] for layout in PAIR]
    plan += [["save", layout, f"{store}/native-{layout}-2", {"steps": [4], "native": True}] for layout in PAIR]
    plan += [["save", "fsdp", f"{store}/thread", {"steps": [3, 4], "how": "thread"}]]
    plan += [["save", "fsdp", f"{store}/cached", {"steps": [3, 4], "caching": True}], ["refused", "", f"{store}/refused", {}]]
    plan += [["load", "ddp", f"{store}/{name}", {"extras": name != "plain-1"}] for name in ("plain-1", "tensor-2")]
    plan += [["load", "fsdp", f"{store}/{name}", {"extras": name != "plain-1"}] for name in (*ALL, "thread")]
    plan += [["load", "columns", f"{store}/{name}", {}] for name in ("fsdp-2", "cached")]
    plan += [["restore", "fsdp", f"{store}/native-{name}", {}] for name in ALL]
    plan += [["restore", "columns", f"{store}/native-tensor-2", {}]]
    plan += [["save", "fsdp", f"{store}/spoilt", {"steps": [3, 4]}], ["spoil", "", f"{store}/spoilt", {"step": 4, "of": 1}]]
    plan += [["load", "fsdp", f"{store}/spoilt", {}], ["load", "fsdp", f"{store}/spoilt", {"which": 4}]]
    plan += [["spoil", "", f"{store}/spoilt", {"step": 3, "of": 0}], ["load", "fsdp", f"{store}/spoilt", {}]]
    return store, job(2, plan)


def of(told: list[list[dict[str, Any]]], verb: str) -> list[list[dict[str, Any]]]:
    return [[one for one in rank if one["verb"] == verb] for rank in told]


def test_every_layout_is_loaded_under_others(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """FSDP2, replicas, tensor parallelism and one process: model, optimizer and values, to the bit, on both ranks."""
    loads = [one[:-3] for one in of(told[1], "load")]
    assert [len(one) for one in loads] == [9, 9]
    assert [one for rank in loads for one in rank if one["wrong"] or one["step"] not in (None, 4)] == []
    assert [one["id"] for one in loads[0]] == [one["id"] for one in loads[1]]


def test_what_dcp_wrote_itself_is_restored_under_other_layouts(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """The same from DCP's own directories, into live modules and optimizers."""
    restored = of(told[1], "restore")
    assert [len(one) for one in restored] == [5, 5]
    assert [one for rank in restored for one in rank if one["wrong"]] == []


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", "tensor-2", "thread", "cached"])
def test_several_ranks_make_one_checkpoint(told: tuple[Path, list[list[dict[str, Any]]]], name: str) -> None:
    """It verifies, loads whole, holds what is replicated once, and both ranks wrote some of it; lists and values are where they were."""
    store = relight.open(told[0] / name)
    assert [findings for _, findings in store.verify()] == [[], []]
    tree, plain = relight.load(told[0] / name), relight.load(told[0] / "plain-1")
    assert all(torch.equal(tree["model"][key], value) for key, value in plain["model"].items())
    assert tree["optim"]["param_groups"] == plain["optim"]["param_groups"]
    assert torch.equal(tree["list"][0], torch.arange(3.0)) and tree["list"][1]["x"] == (1, 2.5) and float(tree["list"][1]["t"]) == 4.5
    assert float(tree["only1"]["scalar"]) == 7 and tree["rank~"] == {"a": 1}
    assert store.latest().body.logical_bytes <= relight.open(told[0] / "plain-1").latest().body.logical_bytes + 1000
    newest = next((told[0] / name).glob("0000000004-*"))
    assert min(pack.stat().st_size for pack in newest.glob("pack-*")) > 20_000
    assert len(list(newest.glob("pack-*"))) == 2


def test_dcps_own_directories_are_read_whole(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """What two ranks wrote with DCP's own writer is the state dict as it was."""
    plain = relight.load(told[0] / "plain-1")
    for name in ALL:
        tree = dcp.read(told[0] / f"native-{name}")
        assert all(torch.equal(tree["model"][key], value) for key, value in plain["model"].items())
        assert tree["optim"]["param_groups"] == plain["optim"]["param_groups"]
        assert tree["list"][1]["x"] == (1, 2.5) and tree["rank"] == {"a": 1} and tree["names"] == {"b", "c"}


def test_a_rank_that_cannot_save_is_named_on_all(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """The one says which value it is, the other which rank; nobody waits, and the run has no checkpoint."""
    for rank in of(told[1], "refused"):
        (one,) = rank
        assert one["error"]["1"][0] == "IncompatibleState" and "own1" in one["error"]["1"][1]
        assert one["error"]["0"][0] == "OthersFailed" and "rank 1" in one["error"]["0"][1]
    assert relight.open(told[0] / "refused").checkpoints() == []


def test_all_ranks_pass_over_what_one_finds_damaged(told: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """``latest`` is then the one before it, on both; by its step it is an error on both; and if all are damaged, too."""
    for rank in of(told[1], "load"):
        latest, by_step, none_left = rank[-3:]
        assert (latest["wrong"], latest["step"]) == ([], 3)
        for one in (by_step, none_left):
            assert {found[0] for found in one["error"].values()} == {"CorruptCheckpoint"} and len(one["error"]) == 2


@pytest.mark.slow
def test_saved_by_another_process(tmp_path: Path) -> None:
    """``async_save`` in DCP's own process: one attempt for all of its saves."""
    job(2, [["save", "fsdp", f"{tmp_path}/run", {"steps": [3, 4], "how": "process"}]])
    assert [(one.step, one.epoch) for one in relight.open(tmp_path / "run").checkpoints()] == [(3, 1), (4, 1)]
