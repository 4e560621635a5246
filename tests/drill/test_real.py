"""Drills of real jobs: of the one that is built in, of a script on a copy of its run, of a job that is under way."""

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
    """With a script in it that makes so many steps, and settings by which no process waits to take another's place."""
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "relight.toml").write_text("[supervise]\nspares = false\n")
    return tmp_path


@pytest.fixture(autouse=True)
def _in_the_background(monkeypatch: pytest.MonkeyPatch) -> None:
    """Saves are made as users' are."""
    monkeypatch.delenv("RELIGHT_BACKGROUND")


def relight(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """A command."""
    command = [sys.executable, "-m", "relight", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=280)


def told(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    """What it says of each rehearsal."""
    report = json.loads(done.stdout)
    return {one["name"]: one for one in report["outcomes"]}


def names(run: Path) -> list[str]:
    """All files of a run."""
    return sorted(str(path.relative_to(run)) for path in run.rglob("*") if path.is_file())


@pytest.mark.slow
def test_a_drill_of_the_built_in_job_passes(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """A rank and an agent are killed; what that has cost is measured; the page is written; nothing is left behind."""
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
        command, cwd=folder, env={**os.environ, "TMPDIR": str(scratch)}, capture_output=True, text=True, check=False, timeout=280
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = told(done)
    assert list(found) == ["kill", "agent"] and {one["verdict"] for one in found.values()} == {"passed"}
    kill = found["kill"]
    assert 0 <= kill["noticed_s"] <= kill["decided_s"] < kill["back_s"] and kill["steps_lost"] >= 0
    assert "the weights at the end are those of an undisturbed run" in kill["why"]
    assert "## kill: passed" in (folder / "page.md").read_text()
    assert done.stderr.splitlines()[0].startswith("kill: passed, ")
    assert [path.name for path in scratch.iterdir() if path.name.startswith("relight-drill-")] == []


def test_a_script_is_drilled_on_a_copy_and_its_own_run_is_not_touched(folder: Path) -> None:
    """It begins where the run's newest checkpoint stands; what is new in the run is the drill's record alone."""
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
    found = told(done)
    assert list(found) == ["copy", "preempt"] and f"step {newest} is whole" in found["copy"]["why"]
    assert "with 75" in found["preempt"]["why"] and found["preempt"]["steps_lost"] == 0
    (one,) = drills_of(open_bytes(folder / "runs"), "demo")
    assert [name for name in names(folder / "runs") if name not in before] == [f"demo/drills/{one.id}.json"]
    shown = relight(folder, "drill", "--history", "runs/demo")
    assert shown.returncode == 0 and "a copy" in shown.stdout and "2 passed" in shown.stdout
    assert json.loads(relight(folder, "drill", "--history", "runs/demo", "--json").stdout)[0]["ok"] is True


@pytest.fixture
def under_way(folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A job of the run, in earnest."""
    command = [sys.executable, "-m", "relight", "run", "train.py", "runs/demo", "1000000"]
    with (folder / "log").open("wb") as log:
        job = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    yield job
    job.terminate()
    assert job.wait(60) == 75, (folder / "log").read_text()


def test_a_job_that_is_under_way_is_drilled_only_if_that_is_meant(folder: Path, under_way: subprocess.Popen[bytes]) -> None:
    """Not without --yes; then a rank of it is killed, and it goes on, and is left to go on."""
    ends = time.monotonic() + 120
    while not list(folder.glob("runs/demo/log/0*3.json")):
        assert under_way.poll() is None and time.monotonic() < ends, (folder / "log").read_text()
        time.sleep(0.1)
    refused = relight(folder, "drill", "--live", "runs/demo")
    assert refused.returncode == 2 and "breaks a real job" in refused.stderr and not (folder / "runs" / "demo" / "incidents").exists()
    done = relight(folder, "drill", "--live", "runs/demo", "--yes", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert told(done)["kill"]["verdict"] == "passed" and under_way.poll() is None
    (one,) = drills_of(open_bytes(folder / "runs"), "demo")
    assert one.live and one.ok


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["train.py", "runs/demo", "5"], "nothing says where the script is to save"),
        (["--only", "nothing"], "there is no rehearsal 'nothing'"),
        (["--from", "runs/demo"], "--from needs a script"),
        (["--copy", "runs/demo", "train.py"], "--copy takes no script"),
        (["--live", "runs/demo", "--yes", "train.py", "{store}"], "takes no script"),
    ],
    ids=["no place", "no such rehearsal", "nothing to begin with", "copy", "live"],
)
def test_what_makes_no_sense_is_refused_before_anything_begins(folder: Path, arguments: list[str], says: str) -> None:
    """With exit code 2, and a sentence."""
    done = relight(folder, "drill", *arguments)
    assert done.returncode == 2 and says in done.stderr, done.stderr
    assert not (folder / "runs").exists()
