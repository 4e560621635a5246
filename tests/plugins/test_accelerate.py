"""Accelerate: killed and resumed, in one process and in two."""

from __future__ import annotations

import pytest
from killing import killed_and_resumed

pytest.importorskip("accelerate", reason="accelerate is not installed: make plugins")


@pytest.mark.shows(
    tool="Accelerate",
    package="accelerate",
    feature="killed and resumed",
    outcome="exact",
    why="the example: accumulated batches",
)
def test_the_example_resumes_to_the_bit(tmp_path) -> None:
    """Repeat the uninterrupted run's losses and rates, with two batches accumulated, killed in epochs 1, 2 and 5."""
    killed_and_resumed(["examples/accelerate_loop.py"], [12, 33, 110], tmp_path)


@pytest.mark.shows(
    tool="Accelerate", package="accelerate", feature="killed and resumed, 2 ranks", outcome="exact", why="gloo"
)
def test_two_ranks_resume_to_the_bit(tmp_path) -> None:
    """Repeat the losses under torchrun with two ranks over gloo, each with its own part of the data."""
    killed_and_resumed(
        ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "examples/accelerate_loop.py"],
        [12, 40],
        tmp_path,
    )
