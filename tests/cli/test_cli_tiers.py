"""``relight cp --tiers`` and ``relight ls --tiers``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.log.test_log_stale_listings import save

from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.policy import Tiers
from relight.store import LocalStore


def relight(*arguments: str | Path, status: int = 0) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "relight", *map(str, arguments)], capture_output=True, text=True, timeout=60
    )
    assert done.returncode == status, (done.stdout, done.stderr)
    return done.stdout if status != 2 else done.stderr


def begin(folder: Path) -> Attempt:
    attempt = Attempt.begin(LocalStore(folder / "hot"), "run")
    tiers = Tiers(hot=folder / "hot" / "run", warm=folder / "warm" / "run", cold=folder / "cold" / "run")
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    return attempt


def test_drain_copies_what_is_lacking_and_reports_it(tmp_path: Path) -> None:
    """A dry run and a run copy until nothing is lacking. The columns of ``ls`` follow."""
    attempt = begin(tmp_path)
    first = save(attempt, 0)
    hot = tmp_path / "hot" / "run"
    assert "cold: lacks 1 checkpoint" in relight("cp", "--tiers", hot, "--dry-run")
    assert {row["tier"] for row in json.loads(relight("cp", "--tiers", hot, "--dry-run", "--json"))["copy"]} == {
        "warm",
        "cold",
    }
    assert "warm: copied 1 checkpoint" in relight("cp", "--tiers", hot)
    assert "cold: nothing to copy" in relight("cp", "--tiers", hot)
    second = save(attempt, 1)
    rows = {row["id"]: row["tiers"] for row in json.loads(relight("ls", hot, "--tiers", "--json"))}
    assert rows == {first: ["hot", "warm", "cold"], second: ["hot"]}
    table = relight("ls", hot, "--tiers")
    assert "warm" in table and table.splitlines()[-1] == "hot: 2, warm: 1, cold: 1"
    result = json.loads(relight("cp", "--tiers", hot, "--json"))
    assert (
        [row["id"] for row in result["copied"]] == [second, second]
        and result["owed"] == {"warm": [], "cold": []}
        and result["errors"] == {}
    )


def test_a_tier_that_fails_is_exit_code_1(tmp_path: Path) -> None:
    """Exit code 1, the reason, and the other tier served."""
    attempt = begin(tmp_path)
    save(attempt, 0)
    (tmp_path / "warm").write_text("no directory")
    assert "FAILED" in relight("cp", "--tiers", tmp_path / "hot" / "run", status=1)
    assert json.loads(relight("cp", "--tiers", tmp_path / "hot" / "run", "--json", status=1))["errors"]["warm"]["kind"]
    assert len(json.loads(relight("ls", tmp_path / "cold" / "run", "--json"))) == 1


def test_a_run_without_tiers(tmp_path: Path) -> None:
    """For a run without tiers, the hint explains how to add some. For a store, a run is requested."""
    save(Attempt.begin(LocalStore(tmp_path), "run"), 0)
    assert "relight.Tiers" in relight("cp", "--tiers", tmp_path / "run", status=2)
    assert "needs a run" in relight("ls", tmp_path, "--tiers", status=2)
    assert "here" in relight("ls", tmp_path / "run", "--tiers")
