"""PEFT: a LoRA adapter on a frozen model, killed and resumed; the frozen parts are not stored in each save."""

from __future__ import annotations

from pathlib import Path

import pytest
from killing import killed_and_resumed

pytest.importorskip("peft", reason="peft is not installed: make plugins")

BASE_BYTES = 4 * (4096 * 256 + 2 * 12 * 256 * 256)
"""Bytes of the frozen matrices of the job's model, at least."""
WAYS = {
    "model": "LoRA, the whole model as component: its frozen base is stored twice, not in each of 12 saves (`compact=True`)",
    "adapter": "LoRA, the adapter alone as component: no save has the frozen base",
    "trainer": "LoRA, with Trainer: the frozen base is stored twice, not in each of 12 saves (`compact=True`)",
}


@pytest.mark.parametrize(
    "way",
    [
        pytest.param(
            way,
            marks=pytest.mark.shows(
                tool="PEFT", package="peft", feature="killed and resumed", outcome="exact", why=what
            ),
        )
        for way, what in WAYS.items()
    ],
)
def test_an_adapter_resumes_to_the_bit(way: str, tmp_path: Path) -> None:
    """Repeat the uninterrupted run's losses after two kills. The frozen base is stored twice, or never with the adapter alone."""
    killed_and_resumed(["-m", "tests.works_with.peft_job", way], [17, 43], tmp_path)
    stored = sum(path.stat().st_size for path in (tmp_path / "straight").rglob("*") if path.is_file())
    bounds = (0, BASE_BYTES // 4) if way == "adapter" else (BASE_BYTES, 3 * BASE_BYTES)
    assert bounds[0] < stored < bounds[1]
