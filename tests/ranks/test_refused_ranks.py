"""If the system refuses something to one rank during a save, that save fails on all ranks at once, and the next one is made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from job import run

import relight

pytestmark = pytest.mark.distributed
STEPS, AT = 5, 2
AT_ONCE_S = 12.0
"""Seconds for one save on a busy machine: less than half the deadline of the ranks."""


def reports(
    tmp_path: Path, place: str, rank: int, writer: str, background: bool, world: int = 2
) -> list[list[dict[str, Any]]]:
    options = {"run": str(tmp_path / "store" / "run"), "place": place, "rank": rank, "step": AT, "writer": writer}
    return run("refused_ranks.py", world, [json.dumps(options)], seconds=120, RELIGHT_BACKGROUND=str(int(background)))


@pytest.mark.parametrize("background", [False, True], ids=["foreground", "background"])
@pytest.mark.parametrize(
    ("place", "rank", "writer"),
    [
        *(
            (place, 1, "every rank")
            for place in ("waiting", "state", "states", "table", "sum", "sums", "own", "request")
        ),
        *((place, rank, "rank 0") for place in ("state", "states", "sums", "own", "request") for rank in (0, 1)),
        ("bytes", 1, "rank 0"),
        ("arrival", 0, "rank 0"),
    ],
)
def test_a_refusal_on_one_rank_costs_one_save_on_all(
    tmp_path: Path, place: str, rank: int, writer: str, background: bool
) -> None:
    """No rank waits for the deadline, both report the same failed save, and the saves after it are committed."""
    both = reports(tmp_path, place, rank, writer, background)
    assert [rank_reports[-1] for rank_reports in both] == [{"raised": ""}] * 2
    for rank_reports in both:
        saves = rank_reports[:-1]
        assert [save["step"] for save in saves if save["kind"]] == [AT], saves
        assert saves[AT]["kind"] != "late_ranks" and saves[AT]["took_s"] < AT_ONCE_S, saves
    assert f"rank {rank}" in both[1 - rank][AT]["text"], both
    checkpoints = relight.open(tmp_path / "store" / "run").checkpoints()
    assert [checkpoint.step for checkpoint in checkpoints] == [step for step in range(STEPS) if step != AT]
    assert not any(checkpoint.body.suspect for checkpoint in checkpoints)
    for _, findings in relight.open(tmp_path / "store" / "run").verify():
        assert findings == []


@pytest.mark.parametrize("place", ["own", "request", "bytes"])
def test_a_refusal_on_one_of_three_ranks(tmp_path: Path, place: str) -> None:
    """Rank 0 ends its exchange with the ranks that have not failed, and with these alone."""
    reports_of_all = reports(tmp_path, place, 1, "rank 0", background=False, world=3)
    assert [rank_reports[-1] for rank_reports in reports_of_all] == [{"raised": ""}] * 3
    for rank_reports in reports_of_all:
        assert [bool(save["kind"]) for save in rank_reports[:-1]] == [step == AT for step in range(STEPS)], rank_reports
        assert rank_reports[AT]["kind"] != "late_ranks" and rank_reports[AT]["took_s"] < AT_ONCE_S, rank_reports


def test_a_refusal_during_an_exchange_is_known_at_once(tmp_path: Path) -> None:
    """Ranks that are out of step can exchange nothing more. They report it in seconds, not at the deadline."""
    for rank_reports in reports(tmp_path, "exchange", 1, "every rank", background=False):
        assert [save["kind"] for save in rank_reports[:-1]] == ["", "", "late_ranks", "none", "none"], rank_reports
        assert rank_reports[AT]["took_s"] < AT_ONCE_S, rank_reports


@pytest.mark.parametrize("writer", ["every rank", "rank 0"])
def test_a_fault_of_a_component_on_one_rank_is_raised_on_all(tmp_path: Path, writer: str) -> None:
    """A fault would fail every later save, too. Both ranks raise it, and the one without it names the other."""
    both = reports(tmp_path, "fault", 1, writer, background=False)
    assert both[1][-1]["raised"] == "TypeError: a fault of the component"
    assert both[0][-1]["raised"].startswith("SaveFailed: rank 1: TypeError: a fault of the component"), both
    assert [[save["step"] for save in rank_reports[:-1]] for rank_reports in both] == [[0, 1]] * 2
