"""Saves of a model on an accelerator: stream by stream to the byte, and to the bit after a restart. ``make device``, ``make gpu``."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from tests.device.kind import KIND, HostWaits, marks
from torch import nn

import relight
from relight.arena.memory import SharedMapping, allocate
from relight.checkpointer.page_locks import pin_memory, pinned
from relight.snapshot import DeviceCopies, Placed
from relight.snapshot.device import pieces

pytestmark = marks
SIZE = 300 << 20
"""Bytes: more than is pinned with one call, so that a copy crosses from one pinned range to the next."""
DEVICE = torch.device(KIND, 0)
QUEUE = relight.Limits(when_busy="queue")


def make(seed: int, width: int = 1024) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(
        nn.Linear(64, width), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1), nn.Linear(width, width)
    ).to(KIND)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)


def one_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.Tensor:
    loss = model(torch.randn(16, 64, device=KIND)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.detach()


def test_a_copy_has_the_state_at_the_call() -> None:
    """Kernels that are queued after the call do not change the copy, although the host waits for nothing."""
    device = torch.device(KIND, torch.accelerator.current_device_index())
    tensors = [torch.randn(size, device=device) for size in (3, 70_000, 40_000_000, 1_000)]
    placed, offset = [], 0
    for number, tensor in enumerate(tensors):
        placed.append(Placed(f"t{number}", tensor, offset))
        offset += -(-tensor.numel() * 4 // 64) * 64
    slot = pinned(offset, device)
    copies = DeviceCopies(placed[:2], placed[2:], device, pinned, in_place=True)
    for turn in range(20):
        expected = [tensor.clone() for tensor in tensors]
        with HostWaits() as host:
            snapshot = copies.begin(slot)
            tensors[0].add_(1)  # what the next forward may do at once: after the copy on the same stream
            tensors[1].mul_(2)
        snapshot.before_step()
        for tensor in tensors:
            tensor.add_(1)
        assert snapshot.finish() == set()
        torch.accelerator.synchronize()
        assert not turn or not host.waited, "the call waited for the device"  # the first loads kernels
        for item, then in zip(placed, expected, strict=True):
            length = then.numel() * 4
            assert torch.equal(slot[item.offset : item.offset + length].view(torch.float32), then.cpu())


def test_memory_of_the_agent_can_be_pinned() -> None:
    """A mapped memfd, by segments: each takes copies, and none takes one that crosses into the next, so ``pieces`` divides them."""
    memory = SharedMapping(allocate(SIZE), SIZE, writable=True)
    memory.populate()
    assert pin_memory([memory], DEVICE)
    source = torch.randn(SIZE // 4, device=KIND)
    target = torch.frombuffer(memory.view, dtype=torch.uint8)
    for begin, end in pieces(0, SIZE):
        target[begin:end].copy_(source.view(torch.uint8)[begin:end], non_blocking=True)
    torch.accelerator.synchronize()
    assert torch.equal(target.view(torch.float32), source.cpu())
    with pytest.raises(RuntimeError, match="invalid argument"):
        target.copy_(source.view(torch.uint8), non_blocking=True)


def test_a_refused_registration_does_not_reach_training() -> None:
    """Memory that is page-locked already is refused, and the next kernel does not report CUDA's error."""
    memories = [SharedMapping(allocate(SIZE), SIZE, writable=True) for _ in range(2)]
    assert pin_memory(memories[1:], DEVICE)
    assert not pin_memory(memories, DEVICE)
    assert torch.ones(8, device=DEVICE).sum().item() == 8


def test_memory_is_unlocked_before_it_is_unmapped() -> None:
    """CUDA would take what is mapped at the same address next for the locked memory, and copy the old pages to the device."""
    for turn in range(5):
        memory = SharedMapping(allocate(SIZE), SIZE, writable=True)
        memory.view[:] = bytes(SIZE)
        assert pin_memory([memory], DEVICE)
        del memory
        after = [torch.full((SIZE // 8,), turn + 1.0) for _ in range(4)]
        for tensor in after:
            assert bool((tensor.to(KIND) == turn + 1).all())


def test_a_run_resumes_to_the_bit(tmp_path: Path) -> None:
    """Straight, and with a save and a restart in the middle: the same losses, parameters and moments."""
    torch.use_deterministic_algorithms(True)
    model, optimizer = make(0)
    straight = [one_step(model, optimizer).item() for _ in range(12)]
    model, optimizer = make(0)
    with relight.Checkpointer(
        tmp_path / "s" / "r", model=model, optimizer=optimizer, save=relight.every(steps=2), limits=QUEUE
    ) as ckpt:
        losses = []
        for step in range(ckpt.restore(), 7):
            losses.append(one_step(model, optimizer).item())
            ckpt.step(step)
    model, optimizer = make(99)
    with relight.Checkpointer(
        tmp_path / "s" / "r", model=model, optimizer=optimizer, save=relight.every(steps=2), limits=QUEUE
    ) as ckpt:
        for step in range(ckpt.restore(), 12):
            losses[step:] = [one_step(model, optimizer).item()]
            ckpt.step(step)
    torch.use_deterministic_algorithms(False)
    assert losses == straight


def test_step_blocks_for_milliseconds(tmp_path: Path) -> None:
    """A gigabyte on the device: ``step()`` returns long before it could have crossed over."""
    model = nn.Sequential(*(nn.Linear(4096, 4096) for _ in range(5))).to(KIND)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    with relight.Checkpointer(tmp_path / "s" / "r", save=None, model=model, optimizer=optimizer, limits=QUEUE) as ckpt:
        waited = []
        for step in range(6):
            loss = model(torch.randn(8, 4096, device=KIND)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            with HostWaits() as host:
                blocked_s = ckpt.save(step, block=False).timings["blocked"]
            waited.append(host.waited if KIND == "sim" else blocked_s > 0.02)
    assert waited[2:].count(True) < 3, waited
