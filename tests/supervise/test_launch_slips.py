"""Mistakes on the command line of ``relight run``: a line and a way out, before any process starts."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
SOURCE = Path(__file__).parents[2] / "src"


EARLY = """
import signal, sys, types
from relight.cli import main

def parse(arguments):
    signal.raise_signal(signal.SIGUSR1)
    raise SystemExit(7)

sys.modules["relight.supervise.launch"] = types.SimpleNamespace(check_script=None, launch=None, parse=parse, SAVED=75, UNSAVED=76)
sys.argv = ["relight", "run", "train.py"]
main()
"""


def test_a_save_that_is_requested_before_the_ranks_run_does_not_end_the_job(tmp_path: Path) -> None:
    """SIGUSR1 comes before ``relight run`` has imported torch and supervises."""
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([sys.executable, "-c", EARLY], cwd=tmp_path, env=environment, timeout=60, check=False)
    assert done.returncode == 7


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        (["trian.py"], "there is no such script [trian.py]\n  → did you mean train.py?"),
        (["folder"], "the script is a directory without a __main__.py [folder]"),
        (["--nope", "train.py"], "there is no option --nope\n  →"),
        ([], "no script is named\n  → relight run [TORCHRUN'S FLAGS] SCRIPT"),
        (["--nproc-per-node", "x", "train.py"], "--nproc-per-node x is invalid"),
        (["--nnodes", "2:x", "train.py"], "--nnodes 2:x is invalid"),
        (["--max-restarts", "x", "train.py"], "--max-restarts is not a whole number: 'x'"),
        (["--no-python", "no-such-program"], "there is no program 'no-such-program'"),
    ],
    ids=str,
)
def test_a_mistake_is_one_line_with_a_way_out(tmp_path: Path, arguments: list[str], shown: str) -> None:
    """Exit code 2, no traceback, no usage block, and no incident."""
    (tmp_path / "train.py").write_text("print('started')\n")
    (tmp_path / "folder").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "relight", "run", *arguments],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(SOURCE)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"relight: {shown}"), done.stderr
    assert len(done.stderr.splitlines()) <= 2
    assert not (tmp_path / "relight-incidents").exists()
