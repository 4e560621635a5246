"""Ranks with different launchers, settings or metrics agree: no exchange waits for a rank that never joins it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job import run

import relight


def reports(tmp_path: Path, **options: Any) -> list[dict[str, Any]]:
    """Return the report of each of two ranks about its start and end."""
    given = {"run": str(tmp_path / "store" / "run"), "save": "every", "steps": 4, **options}
    return [rank_reports[0] for rank_reports in run("alone_ranks.py", 2, [json.dumps(given)])]


@pytest.mark.distributed
@pytest.mark.parametrize("writer", ["every rank", "rank 0"])
@pytest.mark.parametrize("counts", ["01", "10"])
def test_ranks_with_other_restart_counts_agree_on_a_fresh_start(tmp_path: Path, counts: str, writer: str) -> None:
    """Rank 0's launcher decides for all whether ``fresh=True`` holds: torchrun counts restarts for each node."""
    launchers = [{"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_RESTART_COUNT": count} for count in counts]
    zero = [{**launcher, "TORCHELASTIC_RESTART_COUNT": "0"} for launcher in launchers]
    first = reports(tmp_path, fresh=[True, True], environment=zero, writer=writer)
    assert [(report["start"], report["kind"]) for report in first] == [(0, "")] * 2
    second = reports(tmp_path, fresh=[True, True], environment=launchers, writer=writer, steps=6)
    assert [(report["start"], report["kind"]) for report in second] == [(4 if counts[0] == "1" else 0, "")] * 2


@pytest.mark.distributed
def test_ranks_with_another_fresh_are_refused(tmp_path: Path) -> None:
    """``fresh=`` is one decision for the job: ranks that were given different ones are refused by name, and none waits."""
    result = reports(tmp_path, fresh=[True, False])
    assert [report["kind"] for report in result] == ["ConfigError"] * 2 and all(
        "fresh= is True on rank 0" in report["error"] for report in result
    )


@pytest.mark.distributed
def test_ranks_with_other_triggers_are_refused(tmp_path: Path) -> None:
    """Ranks save at the same steps: with different triggers they would meet in different calls, and save nothing."""
    result = reports(tmp_path, every=[2, 3])
    assert [report["kind"] for report in result] == ["ConfigError"] * 2, result
    assert all(
        "save= is 'every(steps=2)' on rank 0, and 'every(steps=3)' on rank 1" in each["error"] for each in result
    )


@pytest.mark.distributed
def test_one_rank_may_also_save_best_values(tmp_path: Path) -> None:
    """The ranks agree on such a save a step ahead, whichever rank requests it."""
    result = reports(tmp_path, also_best=1, seen=[1, 1], every=[4, 4], steps=6)
    assert [(report["kind"], report["step"], report["unsaved"]) for report in result] == [("", 5, [])] * 2, result
    assert [each.step for each in relight.open(tmp_path / "store" / "run").checkpoints()] == [2, 3, 5]


@pytest.mark.distributed
def test_a_job_is_not_fresh_twice_after_rank_0_moved_to_another_node(tmp_path: Path) -> None:
    """After a change of nodes torchrun's count stays 0. One agent in common shows that the job has begun before."""
    agents = [
        {"TORCHELASTIC_RUN_ID": "job", "TORCHELASTIC_ERROR_FILE": f"/logs/{agent}/attempt_0/0/error.json"}
        for agent in "abc"
    ]
    assert [report["start"] for report in reports(tmp_path, fresh=[True, True], environment=agents[:2])] == [0, 0]
    moved = reports(tmp_path, fresh=[True, True], environment=[agents[2], agents[1]], steps=6)
    assert [report["start"] for report in moved] == [4, 4]
    assert relight.open(tmp_path / "store" / "run").checkpoints()[-1].step == 5


@pytest.mark.distributed
@pytest.mark.parametrize("writer", ["every rank", "rank 0"])
def test_all_ranks_save_and_end_together_if_their_metric_never_comes(tmp_path: Path, writer: str) -> None:
    """A trigger that saves nothing ends the job on every rank at one step, after a save: no rank is left in a collective."""
    result = reports(tmp_path, save="best", steps=60, limits={"NEVER_STEPS": 30}, writer=writer)
    assert [(report["kind"], report["step"]) for report in result] == [("ConfigError", 29)] * 2
    assert all("never took effect in 30 steps" in report["error"] for report in result)
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [29]


@pytest.mark.distributed
@pytest.mark.parametrize(("exits", "is_saved"), [(2, False), (3, True)])
def test_an_exit_within_the_block_reports_what_is_not_saved(exits: int, is_saved: bool, tmp_path: Path) -> None:
    """One rank cannot save for the others, which may still train. What ``sys.exit()`` loses must not be lost in silence."""
    result = reports(tmp_path, steps=60, exits=exits)
    assert [report["kind"] for report in result] == ["SystemExit"] * 2
    assert [report["unsaved"] for report in result] == [[] if is_saved else [exits]] * 2


@pytest.mark.distributed
def test_a_metric_of_one_rank_is_enough(tmp_path: Path) -> None:
    """Evaluation may run on one rank: what it reports counts for all of them."""
    result = reports(tmp_path, save="best", steps=60, limits={"NEVER_STEPS": 30}, seen=[1, 12])
    assert [(report["kind"], report["step"]) for report in result] == [("", 59)] * 2


@pytest.mark.distributed
@pytest.mark.parametrize("writer", ["every rank", "rank 0"])
@pytest.mark.parametrize(
    "odd", [[0, 0], [1 << 30, 0], [0, 1 << 30], [1 << 30, 2]], ids=["both", "rank 1", "rank 0", "later"]
)
def test_a_state_that_no_restore_would_take_is_refused_on_all_ranks(
    tmp_path: Path, odd: list[int], writer: str
) -> None:
    """If one rank's state could not be restored, every rank's step raises and names the path; none waits, and nothing is committed."""
    result = reports(tmp_path, odd=odd, writer=writer, steps=8)
    assert [report["kind"] for report in result] == ["IncompatibleState"] * 2, result
    wrong = [rank for rank, step in enumerate(odd) if step < 8]
    assert all("model/norm" in result[rank]["error"] for rank in wrong)
    assert all(f"rank {wrong[0]}: " in report["error"] for rank, report in enumerate(result) if rank not in wrong)
    steps = (
        [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] if min(odd) else []
    )
    assert all(step < min(odd) for step in steps)
