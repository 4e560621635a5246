"""``relight cp --tiers`` and ``relight ls --tiers``."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.log.test_log_stale_listings import save

from relight.catalog.tiers import announce
from relight.commit import Attempt
from relight.drain import drain
from relight.policy import Tiers, keep, tier
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


def ruled(folder: Path) -> Path:
    """Return a run with four saves and rules of its own on both tiers; the far tier has all four."""
    attempt = Attempt.begin(LocalStore(folder / "hot"), "run")
    tiers = Tiers(
        hot=tier(folder / "hot" / "run", keep=keep(last=2)), cold=tier(folder / "cold" / "run", keep=keep(every=3))
    )
    announce(
        attempt.place.log, tiers.tiers[:1] + Tiers(a="/a/b", cold=folder / "cold" / "run").tiers[1:], attempt.epoch
    )
    for step in range(4):
        save(attempt, step)
        drain(attempt.store, "run")
    announce(attempt.place.log, tiers.tiers, attempt.epoch)
    return folder / "hot" / "run"


def test_a_dry_run_without_rules_uses_those_of_the_run(tmp_path: Path) -> None:
    """Each tier's rules, as the log records them, decide; a near tag counts on the further tier; nothing is removed."""
    run = ruled(tmp_path)
    relight("tag", run, "gold", "1")
    text = relight("prune", run, "--dry-run")
    assert "hot, by its own rules: keep(last=2)" in text and "cold, by its own rules: keep(every=3)" in text
    assert text.splitlines()[-1] == "dry run: nothing was done"
    hot, cold = json.loads(relight("prune", run, "--dry-run", "--json"))["tiers"]
    assert [row["step"] for row in hot["checkpoints"] if not row["keep"]] == [0]
    assert {row["step"]: row["reason"] for row in cold["checkpoints"] if row["keep"]} == {
        1: "tagged or on hold in the nearest tier",
        2: "every 3 steps",
        3: "newest, newest verified",
    }
    assert len(json.loads(relight("ls", tmp_path / "cold" / "run", "--json"))) == 4
    assert "--dry-run alone" in relight("prune", run, status=2)
    save(Attempt.begin(LocalStore(tmp_path), "plain"), 0)
    assert "records none" in relight("prune", tmp_path / "plain", "--dry-run", status=2)


def test_a_step_that_only_a_further_tier_has_is_named_there(tmp_path: Path) -> None:
    """The error names the tier and the address of the checkpoint."""
    run = ruled(tmp_path)
    relight("prune", run, "--keep-last", "1", "--yes")
    done = subprocess.run(
        [sys.executable, "-m", "relight", "tag", str(run), "paper", "1"], capture_output=True, text=True, timeout=60
    )
    (checkpoint,) = [row for row in json.loads(relight("ls", tmp_path / "cold" / "run", "--json")) if row["step"] == 1]
    assert done.returncode == 1 and f"it is on tier cold: {tmp_path}/cold/run@{checkpoint['id']}" in done.stderr
