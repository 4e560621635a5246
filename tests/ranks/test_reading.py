"""What all ranks of a node together read on a restore is the state once, whatever the layouts are."""

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
    """Where the first of the tests saves, and the others find it."""
    return tmp_path_factory.mktemp("reading") / "store"


def check(told: list[list[dict[str, Any]]], number: int) -> None:
    """Every rank has the right bytes; together they read the state once, from the store and from the device."""
    found = [rank[number] for rank in told]
    state, what = found[0]["state"], f"{found[0]['run']} as {found[0]['layout']} on {len(told)}"
    assert all(one["wrong"] == [] for one in found), what
    assert all(one["said"] == one["read"] for one in found), what
    assert 0.99 * state <= sum(one["read"] for one in found) <= 1.1 * state, what
    assert sum(one["device"] for one in found) <= 1.1 * state + 1_000_000, what


def test_two_ranks_read_the_state_once(store: Path) -> None:
    """Rows as columns, and replicas; without lending each of the two reads it all."""
    cold = {**SIZE, "cold": True}
    plan = [["save", layout, f"{store}/{layout}", SIZE] for layout in ("rows", "ddp", "fsdp")]
    plan += [["load", "columns", f"{store}/rows", cold], ["load", "ddp", f"{store}/ddp", cold], ["load", "rows", f"{store}/rows", cold]]
    plan += [["load", "columns", f"{store}/rows", {**cold, "alone": True}]]
    told = run("reading.py", 2, [json.dumps(plan)])
    for number in (3, 4, 5):
        check(told, number)
    assert all(rank[6]["read"] >= rank[6]["state"] and rank[6]["wrong"] == [] for rank in told)


def test_three_ranks_read_what_two_saved_once(store: Path) -> None:
    """``fully_shard``, of which pieces straddle; and what is damaged all pass over, though one finds it."""
    plan = [["load", "fsdp", f"{store}/fsdp", {**SIZE, "cold": True}], ["save", "ddp", f"{store}/hurt", {**SIZE, "damage": True}]]
    plan += [["load", "ddp", f"{store}/hurt", SIZE]]
    told = run("reading.py", 3, [json.dumps(plan)])
    check(told, 0)
    assert [(rank[2]["start"], rank[2]["wrong"]) for rank in told] == [(2, [])] * 3


def test_four_ranks_read_the_state_once(store: Path) -> None:
    """Columns of what two saved as rows, replicas, and the shards of what one process saved."""
    reading.save("plain", f"{store}/plain", **SIZE)
    cold = {**SIZE, "cold": True}
    plan = [["load", "columns", f"{store}/rows", cold], ["load", "ddp", f"{store}/ddp", cold], ["load", "fsdp", f"{store}/plain", cold]]
    told = run("reading.py", 4, [json.dumps(plan)])
    for number in range(3):
        check(told, number)
