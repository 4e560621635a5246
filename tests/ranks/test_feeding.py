"""Ranks that share a data set are killed, and others continue in the middle of a training epoch."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from feeding import SAMPLES
from job import Job, run

pytestmark = pytest.mark.distributed


def killed(world: int, options: dict[str, Any]) -> list[list[dict[str, Any]]]:
    """Return the reports of a job's ranks. One rank is killed, then all of them end."""
    job = Job("feeding.py", world, [json.dumps(options)])
    try:
        job.ranks[options["kill"][0]].wait(60)
        for rank in job.ranks:
            rank.kill()
        job.wait(30)
        return [job.reports(rank) for rank in range(world)]
    finally:
        job.close()


def test_every_sample_is_delivered_once_an_epoch(tmp_path: Path) -> None:
    """Two ranks train, then three. Their ledger has the steps that count, without those after the restored
    checkpoint."""
    options = {"run": str(tmp_path / "store" / "run")}
    lives = [killed(2, {**options, "kill": [1, 3]}), run("feeding.py", 3, [json.dumps(options)])]
    start = lives[1][0][0]["start"]
    assert start == 3, lives[1][0]
    steps = [[report for reports in life for report in reports if "step" in report] for life in lives]
    counted = [report for report in steps[0] if report["step"] < start] + steps[1]
    for epoch in (0, 1):
        seen = Counter(place for report in counted if report["epoch"] == epoch for place in report["places"])
        assert seen.keys() == set(range(SAMPLES))
        assert seen.total() - SAMPLES < 3, "repeated for even shares alone"
    assert sorted({report["step"] for report in counted}) == list(range(12))
