"""Copies of device tensors, tested without a device: the streams, their order, and every byte."""

from __future__ import annotations

import contextlib

import pytest
import torch

from relight.snapshot import device as module
from relight.snapshot.device import DeviceCopies, Placed

CPU = torch.device("cpu")


class Fake:
    """Streams that record the requested operations. Copies on this "device" run at once."""

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.main, self.made = FakeStream(self, "main"), 0
        self.current = self.main

    def current_stream(self, device=None):
        return self.current

    def Stream(self, device=None):
        self.made += 1
        return FakeStream(self, f"side{self.made}")

    def Event(self):
        return FakeEvent(self)

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before


class FakeStream:
    def __init__(self, fake: Fake, name: str) -> None:
        self.fake, self.name = fake, name

    def wait_event(self, event) -> None:
        self.fake.log.append(("wait", self.name, event.on))


class FakeEvent:
    def __init__(self, fake: Fake) -> None:
        self.fake, self.on = fake, "nothing"

    def record(self, stream) -> None:
        self.on = stream.name
        self.fake.log.append(("record", stream.name))

    def synchronize(self) -> None:
        self.fake.log.append(("synchronize", self.on))


def pin(size: int, device: torch.device) -> torch.Tensor:
    return torch.zeros(size, dtype=torch.uint8)


def made(fake: Fake) -> tuple[DeviceCopies, list[Placed], torch.Tensor]:
    torch.manual_seed(0)
    sizes = [3, 500_000, 17, 262_144, 1, 70_000]
    placed, offset = [], 0
    for number, size in enumerate(sizes):
        tensor = torch.randn(size) if number % 2 else torch.randint(0, 100, (size,), dtype=torch.int16)
        placed.append(Placed(f"t{number}", tensor, offset))
        offset += -(-tensor.numel() * tensor.element_size() // 64) * 64
    copies = DeviceCopies(placed[:2], placed[2:], CPU, fake, pin)
    return copies, placed, torch.zeros(offset, dtype=torch.uint8)


@pytest.mark.parametrize("pack_bytes", [module.PACK_BYTES, 1000])
def test_every_byte_arrives(pack_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copy large tensors by themselves, and small ones in one pack or several. A second copy is equal."""
    monkeypatch.setattr(module, "PACK_BYTES", pack_bytes)
    copies, placed, slot = made(Fake())
    for _ in range(2):
        slot.zero_()
        for item in placed:
            item.tensor.add_(1)
        assert copies.begin(slot).finish() == set()
        for item in placed:
            assert torch.equal(slot[item.offset : item.offset + item.bytes.numel()], item.bytes)


def test_the_order_of_the_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    """Order the copies after training's stream, and the next step after the copies. Only ``finish`` blocks the host."""
    fake = Fake()
    copies, _, slot = made(fake)
    copied_on: list[str] = []
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda self, *a, **k: (copied_on.append(fake.current.name), copy(self, *a, **k))[1]
    )
    snapshot = copies.begin(slot)
    assert fake.log == [("record", "main"), ("wait", "side1", "main"), ("record", "side1")]
    assert copied_on[:2] == ["main", "main"] and set(copied_on[2:]) == {"side1"}
    snapshot.before_step()
    assert fake.log[3:] == [("wait", "main", "side1")]
    snapshot.finish()
    assert fake.log[4:] == [("synchronize", "side1")]


def test_a_write_before_the_step_is_reported_and_one_after_it_is_not() -> None:
    """Report a write before the next step is queued after the copies. Later writes are allowed."""
    copies, placed, slot = made(Fake())
    early = copies.begin(slot)
    placed[3].tensor.add_(1)
    early.before_step()
    assert early.finish() == {"t3"}
    late = copies.begin(slot)
    late.before_step()
    placed[3].tensor.add_(1)
    assert late.finish() == set()


def test_no_copy_crosses_a_segment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each segment is pinned by a call of its own, and CUDA refuses a copy that begins in one and ends in the next."""
    monkeypatch.setattr(module, "SEGMENT", 1 << 20)
    monkeypatch.setattr(module, "PACKED_BELOW", 1 << 18)
    copies, placed, slot = made(Fake())
    targets: list[tuple[int, int]] = []
    copy = torch.Tensor.copy_

    def recorded(self: torch.Tensor, *args: object, **options: object) -> torch.Tensor:
        offset = self.data_ptr() - slot.data_ptr()
        if 0 <= offset < slot.numel():
            targets.append((offset, offset + self.numel() - 1))
        return copy(self, *args, **options)

    monkeypatch.setattr(torch.Tensor, "copy_", recorded)
    assert copies.begin(slot).finish() == set()
    assert all(first >> 20 == last >> 20 for first, last in targets) and {first >> 20 for first, _ in targets} >= {
        0,
        1,
        2,
    }
    for item in placed:
        assert torch.equal(slot[item.offset : item.offset + item.bytes.numel()], item.bytes)
    assert list(module.pieces(5, 0)) == [] and list(module.pieces(1 << 20, 1)) == [(1 << 20, (1 << 20) + 1)]


def test_without_device_memory_small_tensors_are_copied_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Training may use the whole device memory, so that there is none for a pack."""

    def no_memory(*_: object) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    copies, placed, slot = made(Fake())
    monkeypatch.setattr(torch, "cat", no_memory)
    assert copies.begin(slot).finish() == set()
    for item in placed:
        assert torch.equal(slot[item.offset : item.offset + item.bytes.numel()], item.bytes)
