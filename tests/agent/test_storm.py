"""A slice of ``make storm``: the trainer, its agent, or both are killed, at random moments and in phases of the hand-over."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path


def test_kills_lose_nothing_and_leave_nothing() -> None:
    """After two kills from a seed, promised checkpoints exist undamaged, and no agent is left."""
    command = [sys.executable, "-m", "tests.agent.storm", "--count", "2", "--seed", "1000", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["first"] == []
    assert result["ok"] and result["total"] == 2
