"""The cost of a poll in the caller's thread, in counted calls: the machine's load does not change them."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch import nn

import relight

CALLS_MAX = 25
"""Calls of Python and C functions in a poll without anything new. They take about 2 µs."""


def calls(function: Callable[[], object]) -> Counter[str]:
    """Return the calls of this thread while ``function`` runs, by name."""
    names = Counter[str]()

    def count(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            names[frame.f_code.co_name] += 1
        elif event == "c_call":
            names[getattr(argument, "__name__", "")] += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return names


@pytest.mark.parametrize("count", [10, 1000])
def test_a_poll_without_a_new_checkpoint_costs_the_same_for_any_model(tmp_path: Path, count: int) -> None:
    """With a thread that reads ahead, such a poll plans nothing, reads nothing, and touches no tensor."""
    model = nn.ParameterDict({f"weight{number}": nn.Parameter(torch.zeros(2)) for number in range(count)})
    with relight.Checkpointer(tmp_path / "s/run", model=model, background=False) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    with relight.follow(tmp_path / "s/run", model, every=3600) as follower:
        assert follower.wait(60) is not None
        names = calls(follower.poll)
    assert "poll" in names and names.total() <= CALLS_MAX, names
    assert not {"planned", "plan_restore", "memory_by_name", "data_ptr", "read", "open", "stat"} & set(names)
