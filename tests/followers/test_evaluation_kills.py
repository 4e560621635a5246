"""A slice of ``python -m tests.followers.evaluation_kills``."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.followers.evaluation_kills import kill_followers


@pytest.mark.parametrize("everything", [True, False], ids=["all", "newest"])
def test_each_checkpoint_gets_one_result_whatever_is_killed(everything: bool, tmp_path: Path) -> None:
    """Followers, commands, both; two followers of one name at once. A restarted follower completes what is missing."""
    outcome = kill_followers(tmp_path, 5, seed=int(everything), everything=everything)
    assert not outcome.wrong and outcome.runs > 3, (outcome, (tmp_path / "output").read_text()[-2000:])
