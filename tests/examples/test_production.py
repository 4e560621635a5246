"""The production example, its thinnest slice: everything on, one rank killed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "production" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_leaves_no_trace_in_a_single_loss(tmp_path: Path) -> None:
    """With all features on, and a rank killed, each step's loss is that of the run to which nothing happened."""
    command = [sys.executable, str(RUN), "--steps", "60", "--only", "killed", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "it was taken for a kill" in done.stdout
    assert "all 60 losses are, to the bit" in done.stdout
