"""A small seeded slice of what ``make fleet`` proves: agreement with what is known, and a schedule that learns."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from relight.simulator.clusters import clusters, compare
from relight.simulator.published import hundred_thousand, pairs, restarts

RESULTS = Path(__file__).parents[2] / "benchmarks" / "results"


@pytest.mark.parametrize(
    "check",
    [hundred_thousand, lambda: pairs(16, "0.933", 0.9325, 0.9335), restarts],
    ids=["FT-HSDP", "Gemini", "OPT"],
)
def test_published_results_come_out(check) -> None:
    """Within what their authors state, or twice the scatter of such a count."""
    comparison = check()
    assert comparison.holds, comparison


def test_a_schedule_that_learns_loses_little_more_than_one_that_knows() -> None:
    """On three of the twenty clusters it sees only what a run sees. Fixed intervals lose more on average."""
    losses = compare(clusters(20, lives=40)[3:12:4], fixed=("5m", "1h"))
    assert losses["over_oracle"] <= 0.03, "make fleet has the proof, with all twenty"
    assert losses["best_fixed_over_oracle"] > losses["over_oracle"] + 0.05


def test_the_numbers_of_the_pages_were_measured() -> None:
    """The kept results hold, and are those that docs/simulator.md has."""
    page = (RESULTS.parents[1] / "docs" / "simulator.md").read_text(encoding="utf-8")
    kept = json.loads((RESULTS / "fleet.json").read_text(encoding="utf-8"))
    rows = [*kept["closed_forms"], *kept["published"]]
    assert [row["what"] for row in rows if not row["holds"] or row["what"] not in page] == []
    learned = json.loads((RESULTS / "schedule.json").read_text(encoding="utf-8"))
    assert learned["over_oracle"] <= 0.03 and f"{learned['over_oracle']:+.1%}" in page
    assert all(
        lost > learned["mean"]["adaptive"]
        for name, lost in learned["mean"].items()
        if name not in ("adaptive", "oracle")
    )
