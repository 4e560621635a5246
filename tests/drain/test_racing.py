"""A slice of ``make racing``."""

from __future__ import annotations

from pathlib import Path

from tests.drain.racing import race


def test_all_roles_at_once(tmp_path: Path) -> None:
    """For twelve seconds, listed checkpoints restore exactly in both tiers. No acknowledged save is lost."""
    (tmp_path / "facts").mkdir()
    result = race(str(tmp_path / "near"), str(tmp_path / "far"), tmp_path / "facts", seconds=12, seed=3)
    assert result["wrong"] == [], result
    assert result["kills"] > 3 and result["saved"] > 3, result
