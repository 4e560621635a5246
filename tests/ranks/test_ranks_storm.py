"""A slice of ``make ranks``: one rank of several is killed, stopped, or finds the disk full."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.distributed


def test_the_others_train_on_and_nothing_is_lost() -> None:
    """In a seeded trial no step takes longer than the deadline, durable checkpoints exist, and the next job
    continues."""
    command = [sys.executable, "-m", "tests.ranks.storm", "--count", "1", "--seed", "104", "--json"]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads(done.stdout)
    assert result["ok"] and result["first"] == [] and result["total"] == 1
