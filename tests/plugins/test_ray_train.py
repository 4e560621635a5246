"""Ray Train: a worker is killed with SIGKILL, Ray restarts all workers, and they resume."""

from __future__ import annotations

import pytest
from killing import run

pytest.importorskip("ray.train", reason="ray[train] is not installed: make plugins", exc_type=ImportError)

ENV = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1"}


def test_a_killed_worker_resumes_to_the_bit(tmp_path) -> None:
    """Two workers, the first killed at step 10: every step's loss is the straight run's, and Ray's checkpoint names one that loads."""
    straight = run(["examples/ray_train_loop.py", str(tmp_path / "a")], env=ENV)
    killed = run(["examples/ray_train_loop.py", str(tmp_path / "b"), "10"], env=ENV)
    assert (tmp_path / "b.ray" / "losses.killed").exists()
    assert killed.steps == straight.steps and len(straight.steps) == 24
    again = [line for line in killed.text.splitlines() if line.startswith("step")]
    assert 24 < len(again) < 24 + 10, "it resumed from a save, not from the start"
    assert "with model, optimizer" in killed.text
