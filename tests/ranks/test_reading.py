"""On a restore, all ranks of a node together read the state once, in any layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import reading
from job import run

pytestmark = pytest.mark.distributed

SIZE = {"width": 768, "layers": 4}
"""9.4 MB: parts of 1 to 5 MB, in chunks of one megabyte and more."""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the store in which the first test saves, for the other tests."""
    return tmp_path_factory.mktemp("reading") / "store"


def check(job_reports: list[list[dict[str, Any]]], number: int) -> None:
    """Check that every rank has the right bytes, and that together they read the state once from store and device."""
    reports = [rank[number] for rank in job_reports]
    state, what = reports[0]["state"], f"{reports[0]['run']} as {reports[0]['layout']} on {len(job_reports)}"
    assert all(report["wrong"] == [] for report in reports), what
    assert all(report["reported"] == report["read"] for report in reports), what
    assert 0.99 * state <= sum(report["read"] for report in reports) <= 1.1 * state, what
    assert sum(report["device"] for report in reports) <= 1.1 * state + 1_000_000, what


def test_two_ranks_read_the_state_once(store: Path) -> None:
    """Rows are read as columns, and replicas are read. Without a shared read each rank reads the whole state."""
    cold = {**SIZE, "cold": True}
    plan = [["save", layout, f"{store}/{layout}", SIZE] for layout in ("rows", "ddp", "fsdp")]
    plan += [
        ["load", "columns", f"{store}/rows", cold],
        ["load", "ddp", f"{store}/ddp", cold],
        ["load", "rows", f"{store}/rows", cold],
    ]
    plan += [["load", "columns", f"{store}/rows", {**cold, "alone": True}]]
    reports = run("reading.py", 2, [json.dumps(plan)])
    for number in (3, 4, 5):
        check(reports, number)
    assert all(rank[6]["read"] >= rank[6]["state"] and rank[6]["wrong"] == [] for rank in reports)


def test_three_ranks_read_what_two_saved_once(store: Path) -> None:
    """Three ranks read ``fully_shard`` pieces of two. If one rank detects damage, all skip the checkpoint."""
    plan = [
        ["load", "fsdp", f"{store}/fsdp", {**SIZE, "cold": True}],
        ["save", "ddp", f"{store}/hurt", {**SIZE, "damage": True}],
    ]
    plan += [["load", "ddp", f"{store}/hurt", SIZE]]
    reports = run("reading.py", 3, [json.dumps(plan)])
    check(reports, 0)
    assert [(rank[2]["start"], rank[2]["wrong"]) for rank in reports] == [(2, [])] * 3


def test_four_ranks_read_the_state_once(store: Path) -> None:
    """Four ranks read columns of saved rows, replicas, and shards of a checkpoint of one process."""
    reading.save("plain", f"{store}/plain", **SIZE)
    cold = {**SIZE, "cold": True}
    plan = [
        ["load", "columns", f"{store}/rows", cold],
        ["load", "ddp", f"{store}/ddp", cold],
        ["load", "fsdp", f"{store}/plain", cold],
    ]
    reports = run("reading.py", 4, [json.dumps(plan)])
    for number in range(3):
        check(reports, number)
