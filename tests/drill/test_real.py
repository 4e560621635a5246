"""Drills of real jobs: the built-in job, a script on a copy of its run, a running job."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from relight.catalog.run import Run
from relight.drill.record import drills_of
from relight.store import open_bytes

SCRIPT = """
import sys, time
import numpy, relight

w = numpy.zeros(1000)
with relight.Checkpointer(sys.argv[1], w=w, save=relight.every(steps=5), background=True) as ckpt:
    for step in range(ckpt.restore(), int(sys.argv[2])):
        if not ckpt.should_skip(step):
            w += 1
            ckpt.step(step, loss=1.0 / (step + 1))
        time.sleep(0.05)
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Create a directory with a script that makes this number of steps, and settings without spares."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "relight.toml").write_text("[supervise]\nspares = false\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Save in the background, as users do."""
    monkeypatch.delenv("RELIGHT_BACKGROUND")


def relight(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command."""
    command = [sys.executable, "-m", "relight", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)


def outcomes_of(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """Return the outcome of each rehearsal from the JSON output."""
    report = json.loads(done.stdout)
    return {outcome["name"]: outcome for outcome in report["outcomes"]}


def names(run: Path) -> list[str]:
    """Return the names of all files of a run."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_drill_of_the_built_in_job_passes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rank and an agent are killed, the cost is measured, the page is written, and no file is left."""
    scratch = tmp_path_factory.mktemp("scratch")
    command = [
        sys.executable,
        "-m",
        "relight",
        "drill",
        "--only",
        "agent,kill",
        "--settings",
        "relight.toml",
        "--report",
        "page.md",
        "--json",
    ]
    done = subprocess.run(
        command,
        cwd=folder,
        env={**os.environ, "TMPDIR": str(scratch)},
        capture_output=True,
        text=True,
        check=False,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = outcomes_of(done)
    assert list(outcomes) == ["kill", "agent"] and {outcome["verdict"] for outcome in outcomes.values()} == {"passed"}
    kill = outcomes["kill"]
    assert 0 <= kill["noticed_s"] <= kill["decided_s"] < kill["back_s"] and kill["steps_lost"] >= 0
    assert "the final weights equal those of an undisturbed run" in kill["why"]
    assert "## kill: passed" in (folder / "page.md").read_text()
    assert done.stderr.splitlines()[0].startswith("kill: passed, ")
    assert [path.name for path in scratch.iterdir() if path.name.startswith("relight-drill-")] == []


def test_a_script_is_drilled_on_a_copy_and_its_own_run_is_not_touched(folder: Path) -> None:
    """The drill starts from a copy of the run's newest checkpoint, and only adds its record to the run."""
    assert relight(folder, "run", "train.py", "runs/demo", "20").returncode == 0
    newest, before = Run(open_bytes(folder / "runs"), "demo").history().live[-1].step, names(folder / "runs")
    done = relight(
        folder,
        "drill",
        "--only",
        "preempt",
        "--from",
        "runs/demo",
        "--max-lost-steps",
        "0",
        "--json",
        "train.py",
        "{store}/demo",
        "1000000",
    )
    assert done.returncode == 0, done.stdout + done.stderr
    outcomes = outcomes_of(done)
    assert list(outcomes) == ["copy", "preempt"] and f"step {newest} is undamaged" in outcomes["copy"]["why"]
    assert "with 75" in outcomes["preempt"]["why"] and outcomes["preempt"]["steps_lost"] == 0
    (report,) = drills_of(open_bytes(folder / "runs"), "demo")
    assert [name for name in names(folder / "runs") if name not in before] == [f"demo/drills/{report.id}.json"]
    shown = relight(folder, "drill", "--history", "runs/demo")
    assert shown.returncode == 0 and "a copy" in shown.stdout and "2 passed" in shown.stdout
    assert json.loads(relight(folder, "drill", "--history", "runs/demo", "--json").stdout)[0]["ok"] is True


@pytest.fixture
def under_way(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a real job of the run."""
    command = [sys.executable, "-m", "relight", "run", "train.py", "runs/demo", "1000000"]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    yield job
    job.terminate()
    assert job.wait(60) == 75, (folder / "log").read_text()


def test_a_job_that_is_under_way_is_drilled_only_if_that_is_meant(
    folder: Path, under_way: subprocess.Popen[bytes]
) -> None:
    """Without ``--yes`` the drill is refused. With it, a rank is killed, and the job recovers and continues."""
    ends = time.monotonic() + 120
    while not list(folder.glob("runs/demo/log/0*3.json")):
        assert under_way.poll() is None and time.monotonic() < ends, (folder / "log").read_text()
        time.sleep(0.1)
    refused = relight(folder, "drill", "--live", "runs/demo")
    assert (
        refused.returncode == 2
        and "breaks a real job" in refused.stderr
        and not (folder / "runs" / "demo" / "incidents").exists()
    )
    done = relight(folder, "drill", "--live", "runs/demo", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert outcomes_of(done)["kill"]["verdict"] == "passed" and under_way.poll() is None
    (report,) = drills_of(open_bytes(folder / "runs"), "demo")
    assert report.live and report.ok


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["train.py", "runs/demo", "5"], "no argument names the drill's store"),
        (["--only", "nothing"], "there is no rehearsal 'nothing'"),
        (["--from", "runs/demo"], "--from needs a script"),
        (["--copy", "runs/demo", "train.py"], "--copy takes no script"),
        (["--live", "runs/demo", "--yes", "train.py", "{store}"], "takes no script"),
    ],
    ids=["no place", "no such rehearsal", "nothing to begin with", "copy", "live"],
)
def test_invalid_arguments_are_refused_before_a_process_starts(
    folder: Path, arguments: list[str], expected: str
) -> None:
    """Invalid arguments give exit code 2 and a message."""
    done = relight(folder, "drill", *arguments)
    assert done.returncode == 2 and expected in done.stderr, done.stderr
    assert not (folder / "runs").exists()
