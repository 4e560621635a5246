"""Schedules of copies by several nodes on a store that fails: some hold, and planted bugs are found."""

from __future__ import annotations

import pytest

from proofs.outward import BUGS, main, play
from proofs.seeded_bugs import plant

QUICK = [
    "a part counts as copied before its names are durable",
    "a node does not ask whether its attempt is superseded",
    "COMMIT is written without checking whether the tier has the checkpoint",
    "a part is taken by one node only",
    "a second attempt at a part replaces no file",
]
"""Bugs that a few hundred schedules find. ``make outward`` plants all."""


def test_a_few_hundred_schedules_hold() -> None:
    """Deaths, lost answers, stale listings, power cuts, a second attempt, commands: no invariant is broken."""
    report = play(0, 400)
    assert report.ok, report.show()
    assert report.counts["commits"] > 200 and report.counts["power cuts"] > 20


@pytest.mark.parametrize("name", QUICK)
def test_a_planted_bug_is_found(name: str) -> None:
    """The schedules find the bug."""
    assert play(0, 600, bug=name, stop=True).violated


def test_every_bug_can_be_planted() -> None:
    """The table quotes lines that are in the source."""
    for bug in BUGS.values():
        with plant(bug):
            pass


def test_one_schedule_is_repeated_exactly(capsys: pytest.CaptureFixture[str]) -> None:
    """A seed gives the same trace twice."""
    assert main(["--seed", "9", "--count", "1"]) == 0
    first = capsys.readouterr().out
    assert main(["--seed", "9", "--count", "1"]) == 0
    assert capsys.readouterr().out == first and len(first.splitlines()) > 20
