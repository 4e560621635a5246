"""Several ranks train, lose one, and continue as if nothing had happened."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from job import Job, run

import relight

pytestmark = pytest.mark.distributed


def losses(reports: list[dict[str, Any]]) -> dict[int, float]:
    return {report["step"]: report["loss"] for report in reports if "step" in report}


def train(world: int, background: bool, **options: Any) -> list[list[dict[str, Any]]]:
    return run("training.py", world, [json.dumps(options)], RELIGHT_BACKGROUND=str(int(background)))


def lose(job: Job) -> None:
    """Wait until rank 1 has killed itself, then kill the other ranks."""
    try:
        job.ranks[1].wait(120)
        for rank in job.ranks:
            rank.kill()
        job.wait(60)
    finally:
        job.close()


@pytest.mark.parametrize(("layout", "world", "background"), [
    ("ddp", 2, True), ("tensor_fsdp", 4, True),
    *(pytest.param(*case, marks=pytest.mark.slow) for case in [("fsdp", 3, False), ("flat", 2, True)]),
])  # fmt: skip
def test_an_interrupted_run_ends_as_the_other(tmp_path: Path, layout: str, world: int, background: bool) -> None:
    """After a kill of one rank and a restart, every rank has the same losses as without it, to the bit."""
    straight = train(world, background, layout=layout, run=str(tmp_path / "straight" / "run"), steps=11)
    broken = Job(
        "training.py", world, [json.dumps({"layout": layout, "run": str(tmp_path / "store" / "run"), "steps": 11, "kill": [1, 7, "SIGKILL"],
                                           "pause_s": 0.2, "deadline_s": 5.0})],
        RELIGHT_BACKGROUND=str(int(background)),
    )  # fmt: skip
    lose(broken)
    again = train(world, background, layout=layout, run=str(tmp_path / "store" / "run"), steps=11)
    start = again[0][0]["start"]
    assert 2 <= start <= 7
    for rank in range(world):
        expected = losses(straight[rank])
        result = losses(again[rank])
        assert sorted(result) == list(range(start, 11))
        assert result == {step: expected[step] for step in result}, f"rank {rank}"
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()][-1] == 10
    for _, findings in relight.open(tmp_path / "store" / "run").verify():
        assert findings == []


@pytest.mark.parametrize("writer", ["every rank", pytest.param("rank 0", marks=pytest.mark.slow)])
def test_ranks_that_store_less(tmp_path: Path, writer: str) -> None:
    """With shared, coded and delta chunks, and either writer, losses are equal, also after a kill. Retention keeps what
    is needed."""
    straight = train(2, True, layout="fsdp", run=str(tmp_path / "straight" / "run"), steps=14)
    url = str(tmp_path / "store" / "run")
    options = {
        "layout": "fsdp",
        "run": url,
        "every": 1,
        "writer": writer,
        "compact": {"codecs": "always", "full_every": 3},
        "pause_s": 0.05,
    }
    broken = Job(
        "training.py",
        2,
        [json.dumps({**options, "steps": 14, "kill": [1, 9, "SIGKILL"], "deadline_s": 5.0})],
        RELIGHT_BACKGROUND="1",
    )
    lose(broken)
    again = train(2, True, **options, steps=14)
    assert again[0][0]["start"] >= 2
    for rank in range(2):
        expected = losses(straight[rank])
        assert losses(again[rank]) == {step: expected[step] for step in range(again[0][0]["start"], 14)}
    store = relight.open(tmp_path / "store" / "run")
    assert all(findings == [] for _, findings in store.verify())
    bodies = [checkpoint.body for checkpoint in store.checkpoints()]
    assert bodies[-1].new_bytes < bodies[-1].logical_bytes or bodies[-1].requires
    assert {donor for body in bodies for donor in body.requires} <= {body.id for body in bodies}
    assert len(bodies) <= 3 + 2  # the kept checkpoints, and their donors


@pytest.mark.parametrize("again", [2, 1])
def test_a_restarted_job_restores_from_this_nodes_memory(tmp_path: Path, again: int) -> None:
    """All ranks killed at once, started again, also fewer of them: every part is read from the agent's memory."""
    options = {"layout": "fsdp", "run": str(tmp_path / "store" / "run"), "pause_s": 0.1, "deadline_s": 10.0}
    job = Job("training.py", 2, [json.dumps({**options, "steps": 10_000})], RELIGHT_BACKGROUND="1")
    try:
        ends = time.monotonic() + 100
        while job.output(0).count(" saved as ") < 3 and time.monotonic() < ends:
            time.sleep(0.05)
        for rank in job.ranks:
            rank.kill()
        job.wait(10)
        assert job.output(0).count(" saved as ") >= 3, job.output(0)
    finally:
        job.close()
    second = Job("training.py", again, [json.dumps({**options, "steps": 0})], RELIGHT_BACKGROUND="1")
    try:
        assert second.wait(100) == [0] * again, second.output(0)
        assert "from memory" in second.output(0)
    finally:
        second.close()


def test_a_signal_to_one_rank_ends_all_of_them_after_a_save(tmp_path: Path) -> None:
    """SIGTERM on rank 1 alone: every rank ends by it, at the same step, which was saved."""
    job = Job(
        "training.py",
        2,
        [
            json.dumps(
                {
                    "layout": "ddp",
                    "run": str(tmp_path / "store" / "run"),
                    "steps": 50,
                    "every": 1000,
                    "kill": [1, 5, "SIGTERM"],
                }
            )
        ],
    )
    try:
        assert job.wait(120) == [-signal.SIGTERM] * 2, job.output(0) + job.output(1)
        last = [max(losses(job.reports(rank))) for rank in range(2)]
    finally:
        job.close()
    assert last[0] == last[1]
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [last[0]]
