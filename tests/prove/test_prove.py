"""``relight drill --prove`` on a right script and on six with a planted bug."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from relight.errors import ConfigError
from relight.prove import ProveOptions, compare, drive, run
from relight.prove.trace import TraceEntry

SCRIPT = str(Path(__file__).parent / "planted.py")
BUGS = {
    "rng": ("rng/torch", "random number generator"),
    "scheduler": ("scheduler/", "learning-rate schedule"),
    "loader": ("samples", "the loader is not where it was"),
    "scaler": ("scaler/", "gradient scaler"),
    "moment": ("optimizer/state/0.weight/exp_avg", "optimizer's state"),
    "worker": ("batches", "randomness in the workers"),
}


def test_prove_passes_a_right_script() -> None:
    """A script that resumes to the bit is reported as such, over all the steps that were asked for."""
    report = run(ProveOptions(SCRIPT, ["none"], n=4, k=3))
    assert report.ok, report.difference
    assert report.steps_compared == 3
    assert report.things_compared > 60


@pytest.mark.parametrize(
    "bug", [bug if number % 2 else pytest.param(bug, marks=pytest.mark.slow) for number, bug in enumerate(BUGS)]
)
def test_prove_names_each_planted_bug(bug: str) -> None:
    """The first difference and its usual cause point at what was planted."""
    report = run(ProveOptions(SCRIPT, [bug], n=4, k=2))
    what, cause = BUGS[bug]
    assert not report.ok
    assert report.difference is not None
    assert report.difference.what.startswith(what), report.difference
    assert cause in report.difference.cause


def test_prove_reports_a_script_with_too_few_steps() -> None:
    """A script with too few steps is bad usage, with its own last words."""
    with pytest.raises(ConfigError, match="needs at least"):
        run(ProveOptions(SCRIPT, ["none"], n=19, k=5))


def test_the_directory_of_an_earlier_prove_is_refused(tmp_path: Path) -> None:
    """Otherwise the repaired script would resume the checkpoints of the one before, and the verdict would be wrong."""
    (tmp_path / "store").mkdir()
    with pytest.raises(ConfigError, match="is not empty"):
        run(ProveOptions(SCRIPT, ["none"], n=4, k=2, keep=str(tmp_path)))


def test_a_directory_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    """The error names the directory and the reason. It is not a traceback of the operating system's error."""
    (tmp_path / "file").write_text("")
    for keep in (str(tmp_path / "file" / "kept"), "/proc/self/kept", "/proc/self/fdinfo"):
        with pytest.raises(ConfigError) as caught:
            run(ProveOptions(SCRIPT, ["none"], n=4, k=2, keep=keep))
        assert caught.value.where == keep and caught.value.hint


def test_prove_names_the_error_of_a_script_that_fails(tmp_path: Path) -> None:
    """The message of a script with an ImportError has its error and a command, and no longer a number of steps."""
    script = tmp_path / "train.py"
    script.write_text("import no_such_module\n")
    with pytest.raises(
        ConfigError, match=r"the script failed.*status 1: ModuleNotFoundError(.|\n)*run it alone: python .*train.py"
    ) as caught:
        run(ProveOptions(str(script), n=4, k=2))
    assert "at least" not in str(caught.value)


def test_the_folder_is_removed_although_an_agent_still_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proof once ended with "Directory not empty: 'log'" instead of its result. A process that never ends is no error."""
    script = "import os, sys, time\nwhile True:\n os.makedirs(sys.argv[1], exist_ok=True)\n open(sys.argv[1] + f'/{time.time_ns()}', 'w')\n"
    folder = tmp_path / "proof"
    writer = subprocess.Popen([sys.executable, "-c", script, str(folder / "log")])
    try:
        while not (folder / "log").exists():
            time.sleep(0.01)
        monkeypatch.setattr(drive, "CLEAN_UP_S", 0.3)
        drive.remove_folder(folder)
        monkeypatch.setattr(drive, "CLEAN_UP_S", 60.0)
        threading.Timer(0.5, writer.kill).start()
        drive.remove_folder(folder)
        assert not folder.exists()
    finally:
        writer.kill()
        writer.wait()


def test_the_first_difference_is_ordered_by_cause() -> None:
    """Within a step, a scheduler's difference comes before that of the parameters it leads to."""
    a = TraceEntry(kind="step", step=3, metrics={"loss": "1"}, state={"model/w": "a", "scheduler/last_epoch": "3"})
    b = TraceEntry(kind="step", step=3, metrics={"loss": "1"}, state={"model/w": "b", "scheduler/last_epoch": "4"})
    _, difference = compare([a], [b], kinds={"model": "module", "scheduler": "scheduler"})
    assert difference is not None
    assert (difference.what, difference.also) == ("scheduler/last_epoch", ("model/w",))


@pytest.mark.slow
def test_what_inexact_values_do_to_the_loss() -> None:
    """With moments in 8 and 16 bits, losses after a resume are near the uninterrupted ones, and the command shows
    both."""
    done = subprocess.run(
        [
            sys.executable, "-m", "relight", "drill", "--prove", "-n", "4", "-k", "3", "--json",
            "--lossy", "optimizer/*/exp_avg=int8", "--lossy", "optimizer/*/exp_avg_sq=bfloat16", SCRIPT, "none",
        ],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    rows = json.loads(done.stdout)["drift"]
    assert [row["step"] for row in rows if row["metric"] == "loss"] == [4, 5, 6]
    assert 0 < max(row["relative"] for row in rows) < 0.05
    command = [sys.executable, "-m", "relight", "drill", "--prove", "--lossy", "nonsense", SCRIPT, "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "PATTERN=WAY" in done.stderr
