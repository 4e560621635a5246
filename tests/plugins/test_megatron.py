"""Megatron-Core's dist_checkpointing on two ranks, with its tensors in Relight's format: killed and resumed."""

from __future__ import annotations

import json

import pytest
from killing import killed_and_resumed, run

import relight

pytest.importorskip("megatron.core", reason="megatron-core is not installed: make plugins")

TORCHRUN = ["-m", "torch.distributed.run", "--standalone"]
ENV = {"OMP_NUM_THREADS": "1", "MKL_CBWR": "COMPATIBLE"}
"""Make matrix products independent of their operands' addresses. Otherwise the last bit may differ between attempts."""


def test_the_example_resumes_to_the_bit(tmp_path) -> None:
    """Repeat the losses on two ranks, each with half of two tensors and the whole of one, killed twice."""
    killed_and_resumed([*TORCHRUN, "--nproc-per-node=2", "examples/megatron_sharded.py"], [10, 23], tmp_path, ENV)
    folder = tmp_path / "killed" / "run" / "iter_0000040"
    assert json.loads((folder / "metadata.json").read_text())["sharded_backend"] == "relight"
    assert all(not findings for _, findings in relight.open(folder / "tensors").verify())
    assert list(relight.load(folder / "tensors")["column"].shape) == [64, 8]


def test_another_number_of_ranks_continues(tmp_path) -> None:
    """Load on one rank what two ranks saved. The losses are nearly equal, because sums have another order."""
    straight = run([*TORCHRUN, "--nproc-per-node=2", "examples/megatron_sharded.py", str(tmp_path / "a")], env=ENV)
    killed = run(
        [*TORCHRUN, "--nproc-per-node=2", "examples/megatron_sharded.py", str(tmp_path / "b")], kill_at=18, env=ENV
    )
    alone = run([*TORCHRUN, "--nproc-per-node=1", "examples/megatron_sharded.py", str(tmp_path / "b")], env=ENV)
    assert killed.killed and alone.numbers[0] in (13, 17, 21)
    for name, values in alone.steps.items():
        assert float(values.split()[1]) == pytest.approx(float(straight.steps[name].split()[1]), rel=1e-4), name
