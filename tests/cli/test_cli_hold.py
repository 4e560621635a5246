"""``relight tag --hold``, and retention by time, size and age from the command line."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.log.test_log_stale_listings import save

from relight.commit import Attempt
from relight.store import LocalStore


def relight(*arguments: str | Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "relight", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stderr if status == 2 else done.stdout


def test_hold_list_release(tmp_path: Path) -> None:
    """A hold needs a reason, which is shown until its release. A pruning spares the checkpoint and states why."""
    attempt = Attempt.begin(LocalStore(tmp_path), "run")
    ids = [save(attempt, step) for step in range(3)]
    run = tmp_path / "run"
    assert "nothing is on hold" in relight("tag", "--hold", run)
    assert "reason" in relight("tag", "--hold", run, "0", status=2)
    assert "on hold: incident 42" in relight("tag", "--hold", run, "0", "--why", "incident 42")
    assert json.loads(relight("tag", "--hold", run, "--json")) == [{"id": ids[0], "step": 0, "why": "incident 42"}]
    plan = json.loads(relight("prune", run, "--keep-last", "1", "--yes", "--json"))
    assert plan["retired"] == [ids[1]] and "incident 42" in plan["checkpoints"][0]["reason"]
    assert "released" in relight("tag", "--hold", run, "0", "--release")
    relight("tag", "--hold", run, "0", "--release", status=1)
    assert json.loads(relight("prune", run, "--keep-last", "1", "--yes", "--json"))["retired"] == [ids[0]]


def test_rules_by_time_size_and_age(tmp_path: Path) -> None:
    """Each option reaches its rule, and what makes no sense is refused."""
    attempt = Attempt.begin(LocalStore(tmp_path), "run")
    for step in range(4):
        save(attempt, step)
    run = tmp_path / "run"

    def stays(*options: str) -> list[int]:
        plan = json.loads(relight("prune", run, *options, "--dry-run", "--json"))
        return [checkpoint["step"] for checkpoint in plan["checkpoints"] if checkpoint["keep"]]

    assert stays("--keep-within", "1h") == [0, 1, 2, 3]
    assert stays("--keep-daily", "2") in ([3], [2, 3], [1, 3], [0, 3])
    assert stays("--keep-lag-steps", "2") == [1, 2, 3]
    assert stays("--keep-budget", "1") == [3]
    assert stays("--keep-hourly", "1", "--keep-weekly", "1", "--keep-monthly", "1") == [3]
    assert "such as '30s'" in relight("prune", run, "--keep-within", "soon", "--dry-run", status=2)
