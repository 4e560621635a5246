"""Ranks that share a data set are killed, and others go on in the middle of a training epoch."""

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
    """What the ranks of a job told of which one dies, and then all do."""
    job = Job("feeding.py", world, [json.dumps(options)])
    try:
        job.ranks[options["kill"][0]].wait(60)
        for rank in job.ranks:
            rank.kill()
        job.wait(30)
        return [job.told(rank) for rank in range(world)]
    finally:
        job.close()


def test_every_sample_is_delivered_once_an_epoch(tmp_path: Path) -> None:
    """Two ranks, then three. The ledger of all of them, of the steps that count: what was behind the checkpoint that was restored is not in
    it."""
    options = {"run": str(tmp_path / "store" / "run")}
    lives = [killed(2, {**options, "kill": [1, 3]}), run("feeding.py", 3, [json.dumps(options)])]
    start = lives[1][0][0]["start"]
    assert start == 3, lives[1][0]
    steps = [[one for told in life for one in told if "step" in one] for life in lives]
    counted = [one for one in steps[0] if one["step"] < start] + steps[1]
    for epoch in (0, 1):
        seen = Counter(place for one in counted if one["epoch"] == epoch for place in one["places"])
        assert seen.keys() == set(range(SAMPLES))
        assert seen.total() - SAMPLES < 3, "repeated for even shares alone"
    assert sorted({one["step"] for one in counted}) == list(range(12))
