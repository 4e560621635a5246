"""What saves and restores ask of an accelerator, counted on the simulated one: transfers, bytes, waits, page-locked memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.device import simulated
from tests.device.kind import KIND, marks
from torch import nn

import relight
from relight.reader.chunk_reader import cpu_threads

pytestmark = [*marks, pytest.mark.skipif(KIND != simulated.NAME, reason="a real device does not count")]
QUEUE = relight.Limits(when_busy="queue")
LARGE, SMALL = 6, 200
"""Number of large parameters of 4 MB, and of small ones of 40 kB. AdamW has two moments of each."""


def make(seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model after its first step."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [1_000_000] * LARGE + [10_000] * SMALL
    model = nn.ParameterList([nn.Parameter(torch.randn(size, generator=generator).to(KIND)) for size in sizes])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    train(model, optimizer)
    return model, optimizer


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()


def counted(before: dict[str, int]) -> dict[str, int]:
    now = simulated.load().counters()
    return {name: now[name] - before[name] for name in now}


def test_a_saving_step_waits_for_nothing_and_transfers_each_byte_once(tmp_path: Path) -> None:
    """One transfer for each large tensor, one for each pack of at most 64 MiB of small ones, one for samples of all; no wait of the
    training thread."""
    model, optimizer = make(0)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    packs = -(-3 * SMALL * 40_000 // (64 << 20))
    with relight.Checkpointer(
        tmp_path / "r", model=model, optimizer=optimizer, save=relight.every(steps=1), limits=QUEUE, signals=False
    ) as ckpt:
        ckpt.restore()
        for step in range(4):
            train(model, optimizer)
            torch.accelerator.synchronize()
            before = simulated.load().counters()
            save = ckpt.step(step)
            train(model, optimizer)
            here = counted(before)["waits_here"]
            assert save is not None
            save.wait(60)
            seen = counted(before)
            if step:  # the first save starts the agent and makes the plans
                assert here == 0, "the training thread waited for the device"
                assert seen["to_host"] <= 3 * LARGE + packs + 2, seen
                samples = 3 * (2 * LARGE + SMALL) * 16
                assert state_bytes <= seen["to_host_bytes"] <= state_bytes + samples + 8192, (seen, state_bytes)
                assert seen["unpinned"] <= 1, seen


@pytest.mark.parametrize("background", [True, False])
def test_a_restore_moves_each_byte_once_from_bounded_memory(tmp_path: Path, background: bool) -> None:
    """Every byte crosses the link once, from page-locked memory of at most 12 MiB for each thread and one chunk."""
    model, optimizer = make(0)
    state_bytes = 3 * sum(parameter.nbytes for parameter in model.parameters())
    device = simulated.load()
    with relight.Checkpointer(
        tmp_path / "r", model=model, optimizer=optimizer, save=None, limits=QUEUE, signals=False, background=background
    ) as ckpt:
        ckpt.restore()
        ckpt.save(0)
    model, optimizer = make(1)
    locked, before = device.locked_bytes(), device.counters()
    with relight.Checkpointer(
        tmp_path / "r", model=model, optimizer=optimizer, save=None, limits=QUEUE, signals=False, background=False
    ) as ckpt:
        assert ckpt.restore() == 1
        seen = counted(before)
        steps = (LARGE + SMALL) * 4  # AdamW's step counts are tensors of four bytes
        assert state_bytes <= seen["to_device_bytes"] <= state_bytes + steps + 8192, (seen, state_bytes)
        assert device.locked_bytes() - locked <= (cpu_threads() + 1) * (12 << 20)
    expected, _ = make(0)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), expected.parameters(), strict=True))
