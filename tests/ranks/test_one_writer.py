"""Rank 0 gathers, writes and reads for all ranks, with any change of layout and ranks that cannot open the store."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from click.testing import CliRunner
from job import Job, run

import relight
from relight.cli import cli

pytestmark = pytest.mark.distributed

ONE = {"writer": "rank 0", "background": True}


def job(world: int, *plan: list[Any]) -> list[list[dict[str, Any]]]:
    return run("layouts.py", world, [json.dumps(plan)], seconds=280)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write runs of several layouts, by one rank or all ranks. The jobs also restore each other's runs."""
    store = tmp_path_factory.mktemp("one") / "store"
    reports = [
        *job(2, ["save", "ddp", f"{store}/ddp-2", ONE], ["save", "fsdp", f"{store}/fsdp-2", {**ONE, "background": False}],
             ["save", "fsdp", f"{store}/all-2", {}], ["save", "flat", f"{store}/flat-2", ONE],
             ["save", "stepped_apart", f"{store}/stepped_apart-2", ONE], ["restore", "flat_whole", f"{store}/fsdp-2", ONE]),
        *job(4, ["save", "tensor_fsdp", f"{store}/tensor_fsdp-4", ONE], ["save", "pipeline_fsdp", f"{store}/pipeline_fsdp-4", ONE],
             ["restore", "tensor_fsdp", f"{store}/fsdp-2", ONE], ["restore", "fsdp", f"{store}/all-2", ONE], ["restore", "fsdp", f"{store}/ddp-2", {}]),
        *job(3, ["save", "fsdp", f"{store}/fsdp-3", ONE], ["restore", "fsdp", f"{store}/tensor_fsdp-4", ONE],
             ["restore", "ddp", f"{store}/pipeline_fsdp-4", ONE], ["restore", "fsdp", f"{store}/pipeline_fsdp-4", {}],
             ["restore", "fsdp", f"{store}/fsdp-3", ONE], ["restore", "fsdp", f"{store}/flat-2", ONE],
             ["restore", "ddp", f"{store}/stepped_apart-2", ONE]),
    ]  # fmt: skip
    (store / "reports.json").write_text(json.dumps(reports))
    return store


def test_every_rank_restores_what_one_wrote_and_what_all_wrote(store: Path) -> None:
    """All restores are bit-exact. Each rank gets its own state, and ids are equal on all ranks."""
    result = json.loads((store / "reports.json").read_text())
    restores = 0
    for number, rank in [*enumerate(result[:2]), *enumerate(result[2:6]), *enumerate(result[6:])]:
        for report in rank:
            if report["verb"] == "restore":
                restores += 1
                ranks_saved = int(report["run"].rsplit("-", 1)[1])
                assert (report["wrong"], report["start"], report["own"]) == ([], 5, number % ranks_saved), report
    assert restores == 2 * 1 + 4 * 3 + 3 * 6
    assert [report["ids"] for report in result[2] if "ids" in report] == [
        report["ids"] for report in result[5] if "ids" in report
    ]


@pytest.mark.parametrize(
    "name", ["ddp-2", "fsdp-2", "flat-2", "stepped_apart-2", "tensor_fsdp-4", "pipeline_fsdp-4", "fsdp-3"]
)
def test_one_rank_writes_what_one_process_would(store: Path, name: str) -> None:
    """Rank 0 writes one part and one pack.

    It verifies, loads as a plain tree, is listed, and safetensors reads every tensor.
    """
    run_url = store / name
    assert [findings for _, findings in relight.open(run_url).verify()] == [[], []]
    tree = relight.load(run_url)
    assert set(tree) == {"model", "optimizer", "own", "rng"} and tree["own"]["rank"] == 0
    expected = relight.load(store / "all-2")
    for key, value in expected["model"].items():
        assert torch.equal(tree["model"][key], value), key
    assert tree["optimizer"]["param_groups"] == expected["optimizer"]["param_groups"]
    newest = store / name / relight.open(run_url).latest().body.dir
    assert sorted(path.name for path in newest.iterdir()) == [
        "pack-00000-000.safetensors",
        "part-00000.msgpack",
        "root.json",
    ]
    plain = safetensors.torch.load_file(newest / "pack-00000-000.safetensors")
    assert all(torch.equal(plain[f"model/{key}"], value) for key, value in expected["model"].items())
    for command in (["ls"], ["show", "--stats"], ["verify"]):
        assert CliRunner().invoke(cli, [command[0], str(run_url), *command[1:]]).exit_code == 0


def losses(reports: list[dict[str, Any]]) -> dict[int, float]:
    return {report["step"]: report["loss"] for report in reports if "step" in report}


def test_a_killed_job_resumes_to_the_bit(tmp_path: Path) -> None:
    """After a kill of both ranks the repeated steps have the same losses on each rank.

    Each rank's generator resumes.
    """
    plan = {"layout": "fsdp", "run": str(tmp_path / "store" / "run"), "writer": "rank 0", "every": 4}
    first = Job(
        "training.py",
        2,
        [json.dumps({**plan, "steps": 9, "kill": [1, 7, "SIGKILL"], "wait": True})],
        RELIGHT_BACKGROUND="1",
    )
    try:
        first.ranks[1].wait(250)
        first.ranks[0].kill()
        first.wait(20)
        reports = [first.reports(rank) for rank in range(2)]
    finally:
        first.close()
    again = run("training.py", 2, [json.dumps({**plan, "steps": 8})])
    for rank in range(2):
        assert {"saved": 3, "error": None, "late": []} in reports[rank]
        expected, repeated = losses(reports[rank]), losses(again[rank])
        assert sorted(expected) == list(range(8)) and sorted(repeated) == [4, 5, 6, 7], rank
        assert repeated == {step: expected[step] for step in repeated}, rank
    assert losses(reports[0]) != losses(reports[1]), "each rank draws its own noise"
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [3, 7]


def test_a_rank_that_dies_while_it_gives_is_named_and_the_last_checkpoint_stays(tmp_path: Path) -> None:
    """The other ranks continue without saves. The last committed checkpoint restores, and no other one exists."""
    plan = {"layout": "same", "run": str(tmp_path / "store" / "run"), "steps": 5, "writer": "rank 0", "wait": True, "deadline_s": 60.0,
            "die_giving": [1, 3]}  # fmt: skip
    job = Job("training.py", 3, [json.dumps(plan)], RELIGHT_BACKGROUND="1")
    try:
        assert job.wait(250) == [0, -signal.SIGKILL, 0], job.output(0) + job.output(2)
        for rank in (0, 2):
            saved = [report for report in job.reports(rank) if "saved" in report]
            assert saved == [
                {"saved": 1, "error": None, "late": []},
                {"saved": 3, "error": "late_ranks", "late": [1]},
            ], job.output(rank)
    finally:
        job.close()
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [1]
    assert set(relight.load(tmp_path / "store" / "run")) == {"model", "optimizer", "scheduler", "rng"}
    assert len([path for path in (tmp_path / "store" / "run").iterdir() if path.is_dir()]) == 2, (
        "the log, and one checkpoint"
    )
