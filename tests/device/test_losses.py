"""Losses on a device, which are read every few steps: the supervisor gets the step at which training went wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from tests.device.kind import KIND, marks

from relight.checkpointer.heartbeat_observer import AWAY_EVERY, HeartbeatObserver
from relight.errors import Diverged
from relight.heartbeat import heartbeat

pytestmark = [*marks]


class Trained:
    """What the observer reads of a Checkpointer."""

    replica_mismatch = ""
    _signals = None


@pytest.mark.parametrize("bad", range(20, 20 + AWAY_EVERY))
def test_the_onset_is_the_first_step_with_a_nan(bad: int) -> None:
    """A rollback to any later step would resume weights that are NaN, and would skip the wrong samples."""
    observer, ckpt = HeartbeatObserver(heartbeat()), Trained()

    def train() -> None:
        for step in range(bad + 2 * AWAY_EVERY):
            loss = torch.full((), math.nan if step >= bad else 2.0, device=KIND)
            observer.on_step(ckpt, step, {"loss": loss}, None)  # type: ignore[arg-type]

    with pytest.raises(Diverged, match=rf"step {bad} \[onset {bad}\]"):
        train()


def test_the_onset_is_the_first_step_of_a_jump() -> None:
    """Losses that were high for some steps count by step, as on the host."""
    observer, ckpt = HeartbeatObserver(heartbeat()), Trained()

    def loss_of(step: int) -> Any:
        return torch.full((), 900.0 if step >= 77 else 2.0 + step % 7 / 100, device=KIND)

    with pytest.raises(Diverged, match=r"at step 77, .* for 5 steps \[onset 77\]"):
        for step in range(100):
            observer.on_step(ckpt, step, {"loss": loss_of(step)}, None)  # type: ignore[arg-type]


def test_a_loss_in_memory_that_is_written_again_counts_once() -> None:
    """A CUDA graph writes each step's loss to the same memory. One bad batch is no reason for a rollback."""
    observer, ckpt = HeartbeatObserver(heartbeat()), Trained()
    static = torch.zeros((), device=KIND)
    for step in range(150):
        static.fill_(900.0 if step % AWAY_EVERY == 0 and step >= 90 else 2.0 + step % 7 / 100)
        observer.on_step(ckpt, step, {"loss": static}, None)  # type: ignore[arg-type]


def test_the_onset_of_a_nan_in_memory_that_is_written_again() -> None:
    """The step of the loss counts, not that of the read."""
    observer, ckpt = HeartbeatObserver(heartbeat()), Trained()
    static = torch.zeros((), device=KIND)
    with pytest.raises(Diverged, match=r"step 25 \[onset 25\]"):
        for step in range(60):
            static.fill_(math.nan if step >= 25 else 2.0)
            observer.on_step(ckpt, step, {"loss": static}, None)  # type: ignore[arg-type]
