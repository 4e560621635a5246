"""The production example, a thin slice of it: everything on, one rank killed. All of it is ``make production``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "production" / "run.py"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_leaves_no_trace_in_a_single_loss(tmp_path: Path) -> None:
    """With all features on, and a rank killed, each step's loss is that of the run to which nothing happened."""
    command = [sys.executable, str(RUN), "--only", "killed", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "it was taken for 'killed'" in done.stdout
    assert "no rank read the store to resume" in done.stdout
    assert (tmp_path / "out" / "report.md").exists() and (tmp_path / "out" / "timeline.png").stat().st_size > 10_000
    count = re.search(r"(\d+) of (\d+) losses are, to the bit", done.stdout)
    assert count is not None and count[1] == count[2]
