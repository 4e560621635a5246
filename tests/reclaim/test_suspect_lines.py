"""Retention of suspect checkpoints: they belong to the run's line, and the newest good one stays next to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from relight.commit import Attempt, SaveInfo, SaveRequest
from relight.format.root_keys import SUSPECT
from relight.log import Log, fold
from relight.policy import keep
from relight.reclaim import execute, plan_prune
from relight.store import open_bytes
from relight.testing.scenario import state_of


def save(attempt: Attempt, step: int, parent: str | None, suspect: bool) -> str:
    state = state_of(f"line/{step}")
    user = {SUSPECT.name: "replicas differ"} if suspect else {}
    return attempt.save(
        SaveRequest(
            SaveInfo(step=step, parents=[parent] if parent else [], user=user), tree=state.tree, items=state.items
        )
    ).id


@pytest.mark.parametrize("suspects", [1, 3, 8])
def test_suspect_checkpoints_do_not_fill_the_disk(tmp_path: Path, suspects: int) -> None:
    """If the replicas differ in each save, a run keeps as many as its rules state, and the newest good one."""
    store = open_bytes(tmp_path)
    attempt = Attempt.begin(store, "run", reason="fresh")
    ids: list[str] = []
    for step in range(2 + suspects):
        ids.append(save(attempt, step, ids[-1] if ids else None, step > 1))
        execute(plan_prune(store, "run", keep(last=2)), store, epoch=attempt.epoch)
    live = [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live]
    assert live == ([ids[1], *ids[-2:]] if suspects > 1 else ids[-2:])
    ids.append(save(attempt, 100, ids[-1], suspect=False))
    plan = plan_prune(store, "run", keep(last=2))
    assert not any("abandoned" in verdict.reason for verdict in plan.verdicts)
    execute(plan, store, epoch=attempt.epoch)
    assert [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live] == ids[-2:]


def test_a_suspect_line_of_another_beginning_deletes_nothing_of_the_good_one(tmp_path: Path) -> None:
    """An attempt from scratch with only suspect saves does not affect the earlier line."""
    store = open_bytes(tmp_path)
    first = Attempt.begin(store, "run", reason="fresh")
    old = [save(first, 0, None, False)]
    old.append(save(first, 1, old[0], False))
    second = Attempt.begin(store, "run", reason="fresh")
    new: list[str] = []
    for step in range(4):
        new.append(save(second, step, new[-1] if new else None, True))
    execute(plan_prune(store, "run", keep(last=1)), store, epoch=second.epoch)
    live = [checkpoint.id for checkpoint in fold(Log(store, "run").read()).live]
    assert old[-1] in live and new[-1] in live
