"""A slice of ``make racing``."""

from __future__ import annotations

from pathlib import Path

from tests.drain.racing import race


def test_everybody_at_once(tmp_path: Path) -> None:
    """Twelve seconds: whatever is listed restores to its bits in both tiers, nothing acknowledged is lost, nothing is left behind."""
    (tmp_path / "told").mkdir()
    result = race(str(tmp_path / "near"), str(tmp_path / "far"), tmp_path / "told", seconds=12, seed=3)
    assert result["wrong"] == [], result
    assert result["kills"] > 3 and result["saved"] > 3, result
