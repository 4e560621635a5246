"""The example of followers, shortened."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import relight

EXAMPLE = Path(__file__).parents[2] / "examples" / "follow.py"


@pytest.mark.timeout(240)
def test_an_evaluator_and_a_rollout_worker_follow_a_training_to_its_end(tmp_path: Path) -> None:
    """All processes end by themselves at the last step, each evaluated checkpoint has its loss, and the picture is drawn."""
    command = [sys.executable, str(EXAMPLE), "--steps", "60", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=220)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "val_loss" in done.stdout and (tmp_path / "out" / "followers-lag.png").stat().st_size > 10_000
    reported = {
        checkpoint.step: checkpoint.metrics.get("val_loss")
        for checkpoint in relight.open(tmp_path / "out" / "store" / "gpt").checkpoints()
    }
    for part in ("evaluate", "roll_out"):
        lines = [json.loads(line) for line in (tmp_path / "out" / f"{part}.jsonl").read_text().splitlines()]
        steps = [line["step"] for line in lines]
        assert steps == sorted(set(steps)) and steps[-1] == 59
        if part == "evaluate":
            assert all(reported[line["step"]] == pytest.approx(line["val_loss"]) for line in lines), reported
