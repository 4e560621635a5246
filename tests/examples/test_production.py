"""The production example, a thin slice of it: everything on, one rank killed. All of it is ``make production``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / "examples" / "production" / "run.py"


def test_three_seeds_in_a_row_switch_on_every_feature() -> None:
    """Whichever seed is the first, and no seed switches on what does not exist."""
    code = "import features; print(*(','.join(sorted(features.draw(seed))) for seed in range(30)), *features.FEATURES)"
    done = subprocess.run([sys.executable, "-c", code], cwd=RUN.parent, capture_output=True, text=True, check=True)
    words = done.stdout.split()
    drawn, features = [set(word.split(",")) for word in words[:30]], set(words[30:])
    assert all(drawn[seed] | drawn[seed + 1] | drawn[seed + 2] == features for seed in range(28))
    assert any(features - each for each in drawn), "and not all at once"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_leaves_no_trace_in_a_single_loss(tmp_path: Path) -> None:
    """With all features on, and a rank killed, each step's loss is that of the run to which nothing happened."""
    command = [sys.executable, str(RUN), "--only", "killed", "--out", str(tmp_path / "out")]
    command += ["--features", "tls", "mirrors", "follower", "tracker"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "it was taken for 'killed'" in done.stdout
    assert "no rank read the store to resume" in done.stdout
    assert "both drives have the same" in done.stdout and "nothing in the clear" in done.stdout
    assert "none was a mixture" in done.stdout and "steps, each once" in done.stdout
    assert (tmp_path / "out" / "report.md").exists() and (tmp_path / "out" / "timeline.png").stat().st_size > 10_000
    count = re.search(r"(\d+) of (\d+) losses are, to the bit", done.stdout)
    assert count is not None and count[1] == count[2]
