"""A seeded slice of the long proofs; ``make crash kills teeth`` run them whole."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from relight.testing import crash, kills
from relight.testing.faults import fail_at, positions
from relight.testing.rules import broken
from relight.testing.scenario import prepared


@pytest.mark.crash
def test_five_thousand_crash_points_break_no_promise() -> None:
    """Killed before, behind and inside storage calls, and cut from power: nothing acknowledged is lost, nothing broken is accepted."""
    report = crash.run(5000, seed=7, fork_share=0.15)
    assert report.ok, report.to_dict()
    assert report.total >= 5000
    print(report.to_dict())


@pytest.mark.crash
def test_real_kills_by_system_call_break_no_promise() -> None:
    """SIGKILL injected by the tracer at storage system calls, without the code's cooperation."""
    try:
        report = kills.run(60, seed=3)
    except kills.Unavailable as error:
        pytest.skip(f"60 real kills not done: {error}")
    assert report.ok, report.to_dict()


def test_every_failing_call_of_a_save_is_survived() -> None:
    """EIO, ENOSPC, EDQUOT, EROFS at every call, once and for ever: a typed error, nothing lost, room given back, the next save works."""
    with prepared() as names:
        trials = list(positions())
        wrong = [f"{trial}: {text}" for trial in trials for text in fail_at(trial, names)]
    assert wrong == []
    assert len(trials) > 200


def test_the_rules_of_log_commit_and_reclaim_hold() -> None:
    """Each rule of fencing, retention, sweeping, verification, as one small scene."""
    assert list(broken()) == []


def test_removing_a_guard_is_noticed() -> None:
    """A sample of the mutations that remove an fsync, a link or a check: each is caught by one of the proofs above."""
    done = subprocess.run(
        [sys.executable, "-m", "relight.testing.teeth", "--every", "6", "--json"], capture_output=True, text=True, check=False, timeout=280
    )
    table = json.loads(done.stdout)
    assert table["ok"], [one for one in table["mutations"] if one["caught_by"] is None] or table["unmutated"]
    assert len(table["mutations"]) >= 5
