"""Saves of a model on CUDA: stream by stream to the byte, and to the bit after a restart. ``make gpu``; nothing here has run yet."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from torch import nn

import relight
from relight.checkpointer.slot_copy_plan import pinned, register, unregister
from relight.snapshot import DeviceCopies, Placed, pin_slot

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA here")]
QUEUE = relight.Limits(when_busy="queue")


@pytest.fixture(autouse=True)
def _background(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")


def make(seed: int, width: int = 1024) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)).cuda()
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(16, 64, device="cuda")).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_what_is_copied_is_the_state_at_the_call() -> None:
    """Kernels queued behind the call do not reach the copy, though the host waits for nothing."""
    device = torch.device("cuda", torch.cuda.current_device())
    tensors = [torch.randn(size, device=device) for size in (3, 70_000, 40_000_000, 1_000)]
    placed, at = [], 0
    for number, tensor in enumerate(tensors):
        placed.append(Placed(f"t{number}", tensor, at))
        at += -(-tensor.numel() * 4 // 64) * 64
    slot = pinned(at)
    copies = DeviceCopies(placed[:2], placed[2:], device, torch.cuda, pinned)  # type: ignore[arg-type]
    for _ in range(20):
        expected = [tensor.clone() for tensor in tensors]
        began = time.perf_counter()
        snapshot = copies.begin(slot)
        tensors[0].add_(1)  # what the next forward may do at once: behind the copy on the same stream
        tensors[1].mul_(2)
        took = time.perf_counter() - began
        snapshot.before_step()
        for tensor in tensors:
            tensor.add_(1)
        assert snapshot.finish() == set()
        torch.cuda.synchronize()
        assert took < 0.05, "the call waited for the device"
        for one, then in zip(placed, expected, strict=True):
            length = then.numel() * 4
            assert torch.equal(slot[one.offset : one.offset + length].view(torch.float32), then.cpu())


def test_memory_of_the_agent_can_be_pinned() -> None:
    """A mapped memfd, by segments."""
    from relight.arena.memory import SharedMapping, allocate

    size = 300 << 20
    memory = SharedMapping(allocate(size), size, writable=True)
    memory.populate()
    assert pin_slot(memory.view, register)
    source = torch.randn(size // 4, device="cuda")
    target = torch.frombuffer(memory.view, dtype=torch.float32)
    target.copy_(source, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(target, source.cpu())
    unregister(memory.view)


def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """Straight, and with a save and a restart in the middle: the same losses, parameters and moments."""
    torch.use_deterministic_algorithms(True)
    model, optimizer = make(0)
    straight = [one_step(model, optimizer).item() for _ in range(12)]
    model, optimizer = make(0)
    with relight.Checkpointer(tmp_path / "s" / "r", model=model, optimizer=optimizer, save=relight.every(steps=2), limits=QUEUE) as ckpt:
        losses = []
        for step in range(ckpt.restore(), 7):
            losses.append(one_step(model, optimizer).item())
            ckpt.step(step)
    model, optimizer = make(99)
    with relight.Checkpointer(tmp_path / "s" / "r", model=model, optimizer=optimizer, save=relight.every(steps=2), limits=QUEUE) as ckpt:
        for step in range(ckpt.restore(), 12):
            losses[step:] = [one_step(model, optimizer).item()]
            ckpt.step(step)
    torch.use_deterministic_algorithms(False)
    assert losses == straight


def test_step_blocks_for_milliseconds(tmp_path: Path) -> None:
    """A gigabyte on the device: ``step()`` returns long before it could have crossed over."""
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5))).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with relight.Checkpointer(tmp_path / "s" / "r", save=None, model=model, optimizer=optimizer, limits=QUEUE) as ckpt:
        blocked = []
        for step in range(6):
            loss = model(torch.randn(8, 4096, device="cuda")).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            blocked.append(ckpt.save(step, block=False).timings["blocked"])
    assert sorted(blocked[2:])[1] < 0.02, blocked
