"""Rank 0 writes for all ranks, and one save takes longer than the deadline: it succeeds on every rank."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job import run
from slow_ranks import DEADLINE_S

import relight

pytestmark = pytest.mark.distributed


def reports(tmp_path: Path, background: bool, silent: bool = False) -> list[list[dict[str, Any]]]:
    options = {"run": str(tmp_path / "store" / "run"), "background": background, "silent": silent}
    return run("slow_ranks.py", 2, [json.dumps(options)], seconds=120, RELIGHT_BACKGROUND=str(int(background)))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
def test_a_save_longer_than_the_deadline_succeeds_on_all_ranks(tmp_path: Path, background: bool) -> None:
    """The other ranks wait as long as rank 0 writes. The deadline is for a silent rank 0."""
    for rank_reports in reports(tmp_path, background):
        assert [save["kind"] for save in rank_reports] == ["", ""], rank_reports
        assert all(save["took_s"] > DEADLINE_S for save in rank_reports), rank_reports
    assert [checkpoint.step for checkpoint in relight.open(tmp_path / "store" / "run").checkpoints()] == [0, 1]


def test_a_silent_rank_0_is_late_at_the_deadline(tmp_path: Path) -> None:
    """If rank 0 gives no sign of a save, the other ranks do not wait for ever."""
    _, other = reports(tmp_path, background=True, silent=True)
    assert [save["kind"] for save in other] == ["late_ranks"] and other[0]["took_s"] < 3 * DEADLINE_S, other
