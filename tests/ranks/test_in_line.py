"""Parameters laid end to end and stepped as one flat run on each rank, in more precision than they have: ``relight.flattened``."""

from __future__ import annotations

from pathlib import Path

import pytest
from job import run

import relight

pytestmark = pytest.mark.distributed


def losses(world: int, store: Path, until: int) -> list[float]:
    """Return the losses that rank 0 reported."""
    return run("in_line.py", world, [str(store), str(until)])[0][0]["losses"]  # type: ignore[no-any-return]


@pytest.mark.slow
def test_a_job_continues_with_as_many_ranks_and_with_others(tmp_path: Path) -> None:
    """With as many ranks losses are equal to the bit. With three or one they differ only by the order of sums."""
    whole = losses(2, tmp_path / "whole", 9)
    assert losses(2, tmp_path / "a", 4) == whole[:4]
    assert losses(2, tmp_path / "a", 6) == whole[4:6]
    assert losses(3, tmp_path / "a", 8) == pytest.approx(whole[6:8], rel=1e-2)
    assert losses(1, tmp_path / "a", 9) == pytest.approx(whole[8:], rel=1e-2)
    store = relight.open(tmp_path / "a")
    assert [findings for _, findings in store.verify() if findings] == []
    tree = relight.load(tmp_path / "a")
    assert all(tree["optimizer"]["masters"][name].shape == parameter.shape for name, parameter in tree["model"].items())
    assert all(
        tree["optimizer"]["masters"][name].bfloat16().equal(parameter) for name, parameter in tree["model"].items()
    )
