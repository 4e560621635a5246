"""Copies of an accelerator's tensors to a slot: every byte, the order of the streams, segments, no device memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from tests.device import simulated
from tests.device.kind import KIND, HostWaits, keep_busy, marks

from relight.arena.memory import SharedMapping, allocate
from relight.checkpointer.page_locks import pin_memory, pinned
from relight.snapshot import device as module
from relight.snapshot.device import DeviceCopies, Placed

pytestmark = marks
DEVICE = torch.device(KIND, 0)
SIZES = [3, 500_000, 17, 900_000, 1, 70_000]


def made(in_place: bool) -> tuple[DeviceCopies, list[Placed], torch.Tensor]:
    """Tensors of several dtypes; the first two are copied at once, the others while training continues."""
    torch.manual_seed(0)
    placed, offset = [], 0
    for number, size in enumerate(SIZES):
        tensor = torch.randn(size) if number % 2 else torch.randint(0, 100, (size,), dtype=torch.int16)
        placed.append(Placed(f"t{number}", tensor.to(DEVICE), offset))
        offset += -(-tensor.nbytes // 64) * 64
    memory = SharedMapping(allocate(1 << 23), 1 << 23, writable=True)
    assert not in_place or pin_memory([memory], DEVICE)
    slot = torch.frombuffer(memory.view, dtype=torch.uint8)
    return DeviceCopies(placed[:2], placed[2:], DEVICE, pinned, in_place=in_place), placed, slot


def in_slot(slot: torch.Tensor, item: Placed) -> torch.Tensor:
    return slot[item.offset : item.offset + item.tensor.nbytes]


@pytest.mark.parametrize("in_place", [True, False])
@pytest.mark.parametrize("pack_bytes", [module.PACK_BYTES, 1000])
def test_every_byte_arrives(pack_bytes: int, in_place: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy large tensors by themselves, and small ones in one pack or several. A second copy is equal."""
    monkeypatch.setattr(module, "PACK_BYTES", pack_bytes)
    copies, placed, slot = made(in_place)
    for _ in range(2):
        slot.zero_()
        for item in placed:
            item.tensor.add_(1)
        assert copies.begin(slot).finish() == set()
        for item in placed:
            assert torch.equal(in_slot(slot, item), item.bytes.cpu())


@pytest.mark.skipif(KIND != "sim", reason="only the simulation chooses which stream runs first")
@pytest.mark.parametrize("number", [2, 3])
def test_a_write_that_no_version_counter_shows_is_reported(number: int) -> None:
    """A kernel runs before the copy, and torch has not counted it: samples from the call differ from the copy."""
    copies, placed, slot = made(in_place=True)
    copies.begin(slot).finish()
    simulated.load().adversary(0, "lazy")  # runs only what a call waits for
    snapshot = copies.begin(slot)
    placed[number].tensor.data.add_(1)
    torch.accelerator.current_stream(DEVICE).synchronize()
    snapshot.before_step()
    assert snapshot.finish() == {f"t{number}"}


def test_a_step_waits_while_another_thread_compares_versions(monkeypatch: pytest.MonkeyPatch) -> None:
    """The copying thread has begun to compare version counters: a step that changed them now would fail the save."""
    copies, placed, slot = made(in_place=True)
    inside, may_compare, stepped = threading.Event(), threading.Event(), threading.Event()
    compare, names = copies._touched, []

    def compared(versions: Any) -> set[str]:
        inside.set()
        may_compare.wait(20)
        return compare(versions)

    def step() -> None:
        snapshot.before_step()
        placed[3].tensor.add_(1)
        stepped.set()

    monkeypatch.setattr(copies, "_touched", compared)
    snapshot = copies.begin(slot)
    copying = threading.Thread(target=lambda: names.append(snapshot.finish()))
    copying.start()
    assert inside.wait(20)
    training = threading.Thread(target=step)
    training.start()
    assert not stepped.wait(0.2)
    may_compare.set()
    copying.join(20)
    training.join(20)
    assert names == [set()] and stepped.is_set()


@pytest.mark.parametrize("in_place", [True, False])
def test_kernels_after_the_call_do_not_change_the_copy(in_place: bool) -> None:
    """Only ``finish`` waits: the device itself puts the copies after training's kernels, and the next step after the copies."""
    copies, placed, slot = made(in_place)
    for item in placed:
        item.tensor.mul_(1)  # loads the kernels
    copies.begin(slot).finish()
    expected = [item.bytes.cpu() for item in placed]
    keep_busy()
    with HostWaits() as host:
        snapshot = copies.begin(slot)
        for item in placed[:2]:
            item.tensor.mul_(0)
        snapshot.before_step()
        for item in placed[2:]:
            item.tensor.mul_(0)
    assert snapshot.finish() == set() and not host.waited
    for item, bytes_then in zip(placed, expected, strict=True):
        assert torch.equal(in_slot(slot, item), bytes_then), item.name


def test_a_write_before_the_step_is_reported_and_one_after_it_is_not() -> None:
    """Report a write before the next step is queued after the copies. Later writes are allowed."""
    copies, placed, slot = made(in_place=True)
    early = copies.begin(slot)
    placed[3].tensor.add_(1)
    early.before_step()
    assert early.finish() == {"t3"}
    late = copies.begin(slot)
    late.before_step()
    placed[3].tensor.add_(1)
    assert late.finish() == set()


def test_no_copy_crosses_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment is pinned by a call of its own. The device refuses a copy that begins in one and ends in the next."""
    monkeypatch.setattr(module, "SEGMENT", 1 << 20)
    monkeypatch.setattr(module, "PACKED_BELOW", 1 << 18)
    copies, placed, slot = made(in_place=True)
    assert copies.begin(slot).finish() == set()
    for item in placed:
        assert torch.equal(in_slot(slot, item), item.bytes.cpu())
    assert list(module.pieces(5, 0)) == [] and list(module.pieces(1 << 20, 1)) == [(1 << 20, (1 << 20) + 1)]


@pytest.mark.skipif(KIND != "sim", reason="a real device does not refuse on demand")
def test_a_refused_registration_on_a_full_device_does_not_reach_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """The error of the refusal is taken from the runtime by a kernel that needs no memory."""
    device = simulated.load()
    memory = SharedMapping(allocate(1 << 20), 1 << 20, writable=True)
    device.set_locked_limit(0)
    try:
        for memory_left in (1, 0):  # for one element, and for none
            device.fail_allocation(memory_left)
            assert not pin_memory([memory], DEVICE)
            device.fail_allocation(-1)
            assert torch.ones(8, device=DEVICE).sum().item() == 8
    finally:
        device.set_locked_limit(8 << 30)
        device.fail_allocation(-1)


def test_without_device_memory_small_tensors_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may use the whole device memory, so that there is none for a pack."""

    def no_memory(*_: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("out of memory")

    copies, placed, slot = made(in_place=True)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "cat", no_memory)
        snapshot = copies.begin(slot)
    assert snapshot.finish() == set()
    for item in placed:
        assert torch.equal(in_slot(slot, item), item.bytes.cpu())
