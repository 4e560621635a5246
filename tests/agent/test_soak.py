"""A slice of ``make soak``."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import faults, soak


@pytest.mark.slow
def test_many_saves_hold_no_more_than_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """200 saves: memory, descriptors and threads of trainer and agent are flat."""
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    result = soak(tmp_path, 200)
    assert faults(result) == []
    assert result["checkpoints"] == 2
