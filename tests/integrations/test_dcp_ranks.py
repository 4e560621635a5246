"""Checkpoints saved through torch.distributed.checkpoint under one layout and loaded under another, on one and two gloo
ranks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint.state_dict_saver
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
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[dict[str, Any]]]]:
    """Run everything on two ranks in one job: saves, a save that fails, loads under other layouts, and damage in
    between. Return the stores' folder and each rank's reports."""
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
    plan += [
        ["save", "fsdp", f"{store}/cached", {"steps": [3, 4], "caching": True}],
        ["refused", "", f"{store}/refused", {}],
    ]
    plan += [["load", "ddp", f"{store}/{name}", {"extras": name != "plain-1"}] for name in ("plain-1", "tensor-2")]
    plan += [["load", "fsdp", f"{store}/{name}", {"extras": name != "plain-1"}] for name in (*ALL, "thread")]
    plan += [["load", "columns", f"{store}/{name}", {}] for name in ("fsdp-2", "cached")]
    plan += [["restore", "fsdp", f"{store}/native-{name}", {}] for name in ALL]
    plan += [["restore", "columns", f"{store}/native-tensor-2", {}]]
    plan += [
        ["save", "fsdp", f"{store}/spoilt", {"steps": [3, 4]}],
        ["spoil", "", f"{store}/spoilt", {"step": 4, "of": 1}],
    ]
    plan += [["load", "fsdp", f"{store}/spoilt", {}], ["load", "fsdp", f"{store}/spoilt", {"which": 4}]]
    plan += [["spoil", "", f"{store}/spoilt", {"step": 3, "of": 0}], ["load", "fsdp", f"{store}/spoilt", {}]]
    return store, job(2, plan)


def of(reports: list[list[dict[str, Any]]], verb: str) -> list[list[dict[str, Any]]]:
    return [[report for report in rank if report["verb"] == verb] for rank in reports]


def test_every_layout_is_loaded_under_others(saved: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Load FSDP2, replicas, tensor parallelism and one process: model, optimizer and values are bit-identical on both
    ranks."""
    loads = [reports[:-3] for reports in of(saved[1], "load")]
    assert [len(reports) for reports in loads] == [9, 9]
    assert [report for rank in loads for report in rank if report["wrong"] or report["step"] not in (None, 4)] == []
    assert [report["id"] for report in loads[0]] == [report["id"] for report in loads[1]]


def test_dcps_own_checkpoints_are_restored_under_other_layouts(saved: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Restore DCP's own directories into live modules and optimizers."""
    restored = of(saved[1], "restore")
    assert [len(reports) for reports in restored] == [5, 5]
    assert [report for rank in restored for report in rank if report["wrong"]] == []


@pytest.mark.parametrize("name", ["ddp-2", "fsdp-2", "tensor-2", "thread", "cached"])
def test_several_ranks_make_one_checkpoint(saved: tuple[Path, list[list[dict[str, Any]]]], name: str) -> None:
    """Verify and load a checkpoint of two ranks. Both ranks wrote a part of it, and what is replicated is stored once.
    Lists and values are unchanged."""
    store = relight.open(saved[0] / name)
    assert [findings for _, findings in store.verify()] == [[], []]
    tree, plain = relight.load(saved[0] / name), relight.load(saved[0] / "plain-1")
    assert all(torch.equal(tree["model"][key], value) for key, value in plain["model"].items())
    assert tree["optim"]["param_groups"] == plain["optim"]["param_groups"]
    assert (
        torch.equal(tree["list"][0], torch.arange(3.0))
        and tree["list"][1]["x"] == (1, 2.5)
        and float(tree["list"][1]["t"]) == 4.5
    )
    assert float(tree["only1"]["scalar"]) == 7 and tree["rank~"] == {"a": 1}
    assert store.latest().body.logical_bytes <= relight.open(saved[0] / "plain-1").latest().body.logical_bytes + 1000
    newest = next((saved[0] / name).glob("0000000004-*"))
    assert min(pack.stat().st_size for pack in newest.glob("pack-*")) > 20_000
    assert len(list(newest.glob("pack-*"))) == 2


def test_dcps_own_directories_are_read_whole(saved: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Read what two ranks wrote with DCP's own writer as the unchanged state dict."""
    plain = relight.load(saved[0] / "plain-1")
    for name in ALL:
        tree = dcp.read(saved[0] / f"native-{name}")
        assert all(torch.equal(tree["model"][key], value) for key, value in plain["model"].items())
        assert tree["optim"]["param_groups"] == plain["optim"]["param_groups"]
        assert tree["list"][1]["x"] == (1, 2.5) and tree["rank"] == {"a": 1} and tree["names"] == {"b", "c"}


def test_a_rank_that_cannot_save_is_named_on_all(saved: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Report the value that cannot be saved on its rank, and the rank's number on the other. No rank waits, and the run
    has no checkpoint."""
    for rank in of(saved[1], "refused"):
        (report,) = rank
        assert report["error"]["1"][0] == "IncompatibleState" and "own1" in report["error"]["1"][1]
        assert report["error"]["0"][0] == "OthersFailed" and "rank 1" in report["error"]["0"][1]
    assert relight.open(saved[0] / "refused").checkpoints() == []


def test_all_ranks_skip_a_checkpoint_that_one_finds_damaged(saved: tuple[Path, list[list[dict[str, Any]]]]) -> None:
    """Load the previous checkpoint on both ranks if the latest is damaged. Naming the damaged step is an error on both
    ranks, and so is a run with only damaged checkpoints."""
    for rank in of(saved[1], "load"):
        latest, by_step, none_left = rank[-3:]
        assert (latest["wrong"], latest["step"]) == ([], 3)
        for report in (by_step, none_left):
            assert {failure[0] for failure in report["error"].values()} == {"CorruptCheckpoint"} and len(
                report["error"]
            ) == 2


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(torch.distributed.checkpoint.state_dict_saver, "AsyncCheckpointerType"),
    reason="torch 2.6 saves from a thread only",
)
def test_saved_by_another_process(tmp_path: Path) -> None:
    """Use one attempt for all saves of ``async_save`` in DCP's own process."""
    job(2, [["save", "fsdp", f"{tmp_path}/run", {"steps": [3, 4], "how": "process"}]])
    assert [(checkpoint.step, checkpoint.epoch) for checkpoint in relight.open(tmp_path / "run").checkpoints()] == [
        (3, 1),
        (4, 1),
    ]
