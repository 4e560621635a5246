"""Metrics that arrive between a plan of retention and its execution: what is the best by then stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import relight
from relight.reclaim import execute, plan_prune
from relight.store import open_bytes


@pytest.mark.parametrize("named", [True, False])
def test_what_became_the_best_since_the_plan_stays(tmp_path: Path, named: bool) -> None:
    """An evaluation reports the best metric after the plan was made. The plan does not retire that checkpoint."""
    url = tmp_path / "s" / "r"
    for step, accuracy in enumerate((0.5, 0.1, 0.1, 0.1)):
        relight.save(url, {"x": torch.tensor(step)}, step=step, metrics={"accuracy": accuracy})
    store = open_bytes(tmp_path / "s")
    plan = plan_prune(store, "r", relight.keep(last=1, best=1, metric="accuracy" if named else None, mode="max"))
    steps = {checkpoint.id: checkpoint.step for checkpoint in relight.open(url).checkpoints()}
    assert [steps[going] for going in plan.going] == [1, 2]
    relight.open(url).report({"accuracy": 0.9}, "step=1")
    assert [steps[retired] for retired in execute(plan, store).retired] == [2]
    assert relight.load(url, "best:accuracy:max")["x"] == 1
