"""If memory is refused to one rank during a restore from rank 0, all ranks raise at once, and can restore again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from job import run

pytestmark = pytest.mark.distributed
AT_ONCE_S = 12.0
"""Seconds for one restore on a busy machine: less than half the deadline of the ranks."""


@pytest.mark.parametrize(
    ("place", "rank"),
    [("listing", 1), ("needs", 1), ("needs", 0), ("room", 1), ("arrival", 1), ("requests", 0), ("posting", 0)],
)
def test_memory_refused_to_one_rank_ends_the_restore_on_all(tmp_path: Path, place: str, rank: int) -> None:
    """No rank waits for the deadline, all report the refusal of that rank, and the next restore succeeds."""
    options = {"run": str(tmp_path / "store" / "run"), "place": place, "rank": rank}
    reports = run("refused_restores.py", 3, [json.dumps(options)], seconds=150)
    for number, (first, second) in enumerate(reports):
        assert first["kind"] == "no_memory" and first["took_s"] < AT_ONCE_S, reports
        assert number == rank or f"rank {rank}" in first["text"], reports
        assert second["kind"] == "" and second["restored"], reports
