"""Log, fencing, the commit of several ranks and deletion, among many processes that are slow, late, dead or in doubt."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from proofs import schedules
from proofs.schedule_explorer import Action
from proofs.schedules import find, main, play, trace
from proofs.seeded_bugs import PLANTED, planted
from proofs.simulate import KINDS
from proofs.simulated_store import FAULTS

SEEDS = 200
SURELY = 5000
"""Seeds within which each planted bug is found."""
RARE = frozenset(
    {
        "a save that may have been committed is removed",
        "a process takes its own record for another's",
        "retention retires a tagged checkpoint",
    }
)
"""These take some seconds."""


def test_a_few_hundred_schedules_hold() -> None:
    """No invariant is broken, and enough happens: commits, saves given up, retirements, and every kind of fault but rare ones."""
    report = play(0, SEEDS)
    faults = report.tables["faults"]
    assert report.violations == []
    assert report.total == SEEDS
    assert min(report.counts[name] for name in ("commits", "acknowledged", "given_up", "retired")) > 20
    assert faults["death"] > 20 and faults["cut"] > 3
    met = {
        kind for operation in FAULTS for kind in FAULTS[operation] if any(name.endswith(f" {kind}") for name in faults)
    }
    assert met >= {"refused", "full", "left", "done", "unsure", "unsure_done", "late", "stale"}


def test_a_seed_repeats_a_schedule() -> None:
    """A seed gives the same actions of the same processes at the same simulated times, also in another process."""
    for seed in range(20):
        assert trace(seed) == trace(seed)
    done = subprocess.run(
        [sys.executable, "-m", "proofs.schedules", "--count", "1", "--seed", "7", "--json"],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        check=True,
        timeout=60,
    )
    assert json.loads(done.stdout)["trace"] == [str(Action(*action)) for action in trace(7).trace]


@pytest.mark.parametrize("bug", [name for name in PLANTED if name not in RARE])
def test_a_planted_bug_is_found(bug: str) -> None:
    """Break the protocol in one place, and a schedule shows it."""
    assert find(bug, 0, SURELY).violated, bug


@pytest.mark.slow
@pytest.mark.parametrize("bug", sorted(RARE))
def test_a_rare_planted_bug_is_found(bug: str) -> None:
    """These bugs need more schedules."""
    assert find(bug, 0, SURELY).violated, bug


@pytest.mark.parametrize("bug", PLANTED)
def test_a_bug_is_planted_and_taken_out_again(bug: str) -> None:
    """Each edit finds its line. Afterwards the product is unchanged."""
    from proofs.seeded_bugs import _function

    functions = [_function(edit.function) for edit in PLANTED[bug].edits]
    before = [function.__code__ for function in functions]
    with planted(bug):
        assert all(function.__code__ is not code for function, code in zip(functions, before))
    assert all(function.__code__ is code for function, code in zip(functions, before))


def test_the_command_fails_for_a_planted_bug(capsys: pytest.CaptureFixture[str]) -> None:
    """The exit status is 1, and the output has the seed and the events before the violation."""
    assert main(["--count", "10", "--mutation", "a save does not ask whether it is fenced"]) == 1
    output = capsys.readouterr().out
    assert "WRONG" in output and "no COMMIT of it counts" in output and "put_once" in output
    assert main(["--count", "5", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["total"] == 5


def test_faults_that_are_left_out_are_known() -> None:
    """Faults that the product does not survive yet are a subset of the possible ones."""
    assert schedules.OPEN <= KINDS
