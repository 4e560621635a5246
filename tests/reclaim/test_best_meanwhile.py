"""Metrics that arrive between a plan of retention and its execution: what is the best by then stays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

import relight
from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.drain import drain
from relight.reclaim import execute, plan_prune
from relight.store import ByteStore, LocalStore, open_bytes


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


TIERS = {"near": {"last": 1}, "far": {"best": 1, "metric": "accuracy", "mode": "max"}}


def near_of(folder: Path) -> ByteStore:
    """Announce two tiers, and return the near store."""
    attempt = Attempt.begin(LocalStore(folder / "near"), "r")
    places = {name: relight.tier(folder / name / "r", keep=relight.keep(**rules)) for name, rules in TIERS.items()}
    announce(attempt.place.log, relight.Tiers(**places).tiers, attempt.epoch)
    return attempt.store


def test_what_became_the_best_for_a_further_tier_stays(tmp_path: Path) -> None:
    """Only the further tier keeps the best. An evaluation names one that it lacks after the near tier's plan was made."""
    store, url = near_of(tmp_path), tmp_path / "near" / "r"
    for step, accuracy in enumerate((0.5, 0.1, 0.1, 0.1)):
        relight.save(url, {"x": torch.tensor(step)}, step=step, metrics={"accuracy": accuracy})
    plan = plan_prune(store, "r", relight.keep(last=1))
    steps = {checkpoint.id: checkpoint.step for checkpoint in relight.open(url).checkpoints()}
    assert [steps[going] for going in plan.going] == [1, 2], "the best one so far is not on the further tier yet"
    relight.open(url).report({"accuracy": 0.9}, "step=1")
    retired = execute(plan, store).retired
    assert [steps[each] for each in retired] == [2]
    drain(store, "r")
    assert relight.load(tmp_path / "far" / "r", "best:accuracy:max")["x"] == 1


def test_what_its_further_tier_no_longer_keeps_stays(tmp_path: Path) -> None:
    """A full near tier removes what the further tier has. By then the further tier's rules name another one."""
    store, url = near_of(tmp_path), tmp_path / "near" / "r"
    for step, accuracy in enumerate((0.5, 0.1, 0.1)):
        relight.save(url, {"x": torch.full((1000,), step)}, step=step, metrics={"accuracy": accuracy})
        drain(store, "r")
    rules = replace(relight.keep(last=3), capacity=30_000)
    plan = plan_prune(store, "r", rules)
    steps = {checkpoint.id: checkpoint.step for checkpoint in relight.open(url).checkpoints()}
    assert [steps[going] for going in plan.going] == [0], "it is the best, and the further tier keeps it"
    relight.open(url).report({"accuracy": 0.9}, "step=1")
    assert execute(plan, store).retired == []
