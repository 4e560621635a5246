"""A slice of ``python -m tests.followers.switch_kills``."""

from __future__ import annotations

from pathlib import Path

from tests.followers.switch_kills import kill_at_random


def test_no_follower_computes_with_a_mixture(tmp_path: Path) -> None:
    """Trainer, agent and followers are killed. The checksum in the weights fits after every poll, and all reach the newest checkpoint."""
    outcome = kill_at_random(tmp_path, 12, seed=3)
    assert not outcome.wrong and sum(outcome.switches.values()) > 3, outcome
