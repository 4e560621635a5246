"""Variants of FSDP2 that the page on many ranks names: each is killed, resumed and compared."""

from __future__ import annotations

from pathlib import Path

import pytest

import relight

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(600)
@pytest.mark.parametrize("way", ["meta", "offload"])
def test_a_variant_resumes_to_the_same_losses(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model of the meta device, with or without offload, and with accumulated gradients: equal losses after a kill. Checkpoints have the
    metrics of rank 0, and none that only rank 1 reports."""
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "plugins"))
    from killing import killed_and_resumed

    script = str(ROOT / "tests" / "ranks" / "fsdp2_variants.py")
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", script, way]
    killed_and_resumed(command, [17], tmp_path, {"OMP_NUM_THREADS": "1"})
    checkpoints = relight.open(tmp_path / "killed" / "run").checkpoints()
    assert [dict(checkpoint.metrics) for checkpoint in checkpoints] == [{"of_rank": 0.0}] * 8
