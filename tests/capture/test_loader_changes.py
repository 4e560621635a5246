"""A resume after a change of the loader is exact, delivers each sample once, or is refused. No loss is silent."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import pytest
from loader_changes import AGAIN, CHANGES, EXACT, KINDS, ONCE, REFUSED, outcome, outcome_of_ranks

warnings.filterwarnings("ignore")
logging.getLogger("torchdata").setLevel(logging.ERROR)
PAGE = Path(__file__).parents[2] / "docs" / "guides" / "data.md"
WORDS = {"exact": EXACT, "once": ONCE, "refused": REFUSED, "start": AGAIN}
WITH_WORKERS = ("none", "batch size", "workers", "no workers", "prefetcher")


def table() -> dict[str, dict[str, str]]:
    """Return the page's table: kind, change, outcome."""
    lines = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")]
    head = next(line for line in lines if line.startswith("| loader |"))
    names = [cell.strip() for cell in head.strip("|").split("|")][1:]
    rows = {}
    for line in lines[lines.index(head) + 1 :]:
        kind, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if kind in KINDS:
            rows[kind] = dict(zip(names, (WORDS[cell] for cell in cells), strict=True))
    return rows


def test_the_page_has_every_kind_and_every_change() -> None:
    """Document every kind of loader and every change."""
    assert table().keys() == KINDS.keys()
    assert all(row.keys() == {*CHANGES, "ranks"} for row in table().values())


@pytest.mark.parametrize("change", [name for name in CHANGES if name != "no workers"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_has_the_documented_outcome(kind: str, change: str) -> None:
    """Check each cell of the table without workers."""
    assert outcome(kind, change, 0) == table()[kind][change]


@pytest.mark.parametrize("change", WITH_WORKERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_change_with_workers_has_the_documented_outcome(kind: str, change: str) -> None:
    """Check each cell of the table with two workers."""
    assert outcome(kind, change, 2) == table()[kind][change]


@pytest.mark.parametrize("kind", KINDS)
def test_another_number_of_ranks_has_the_documented_outcome(kind: str) -> None:
    """Continue one rank's training epoch with two ranks, or restart it and report that."""
    assert outcome_of_ranks(kind) == table()[kind]["ranks"]
