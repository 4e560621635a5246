"""Copy an accelerator's tensors into pinned memory on a separate stream, while the next forward and backward run.

The host never waits. Tensors that training may change in the next forward are copied on training's own stream, before
the kernels that training queues next. Parameters and moments are copied on a side stream, and the next
``optimizer.step`` is queued after them. Small tensors are first packed on the device, so that many of them need one
transfer; the host copies them to their places at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from relight.layout.sources import address_of
from relight.snapshot.touch_detection import SmallCopies

PACKED_BELOW = 1 << 20
PACK_BYTES = 64 << 20
SEGMENT = 256 << 20
"""Bytes to pin with one call: registering gigabytes at once fails with some drivers."""


class Streams(Protocol):
    """The part of ``torch.cuda`` that is used; ``torch.xpu`` has the same. Tests pass a fake that records the calls."""

    def current_stream(self, device: Any = None) -> Any:
        """Return the stream on which training queues its kernels."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Return a context manager that queues on ``stream``."""

    def Stream(self, device: Any = None) -> Any:  # noqa: N802
        """Return a new stream."""

    def Event(self) -> Any:  # noqa: N802
        """Return a new event."""


class Placed(NamedTuple):
    """A contiguous device tensor, and its offset in a slot."""

    name: str
    tensor: torch.Tensor
    offset: int

    @property
    def bytes(self) -> torch.Tensor:
        """The tensor's memory as a flat tensor of bytes, without a copy."""
        return self.tensor.detach().reshape(-1).view(torch.uint8)


class _Pack(NamedTuple):
    """Small tensors that are transferred together, and the pinned memory that receives them."""

    held: list[Placed]
    arrived: torch.Tensor
    small_copies: SmallCopies

    def copy_singly(self) -> None:
        """Queue one transfer for each tensor. Slower than one for all, and needs no device memory."""
        start = 0
        for placed in self.held:
            data = placed.bytes
            self.arrived[start : start + data.numel()].copy_(data, non_blocking=True)
            start += data.numel()


class DeviceCopies:
    """The tensors of one device, prepared once and copied for every snapshot. ``pin`` allocates that many bytes of
    pinned host memory."""

    def __init__(
        self,
        now: Iterable[Placed],
        later: Iterable[Placed],
        device: torch.device,
        streams: Streams,
        pin: Callable[[int, torch.device], torch.Tensor],
    ) -> None:
        self.device, self._streams = device, streams
        self._now, self._later = (_packed(tensors, lambda size: pin(size, device)) for tensors in (now, later))
        self._tensors = [placed.tensor for placed in self._later.all]
        self._names = [placed.name for placed in self._later.all]
        self._side = streams.Stream(device)

    def begin(self, slot: torch.Tensor) -> DeviceSnapshot:
        """Queue all copies into ``slot``, a tensor of pinned bytes. Return at once."""
        streams = self._streams
        snapshot = DeviceSnapshot(self, slot.data_ptr(), [tensor._version for tensor in self._tensors])
        # on training's stream: the kernels that it queues next run after the copies
        snapshot.keeps += self._now.queue(slot)
        start = streams.Event()
        start.record(streams.current_stream(self.device))
        self._side.wait_event(start)
        with streams.stream(self._side):
            snapshot.keeps += self._later.queue(slot)
        snapshot.copied.record(self._side)
        return snapshot

    def _touched(self, versions: Sequence[int]) -> set[str]:
        return {
            name
            for name, tensor, then in zip(self._names, self._tensors, versions, strict=True)
            if tensor._version != then
        }


class DeviceSnapshot:
    """Copies that are queued on a device."""

    def __init__(self, copies: DeviceCopies, slot: int, versions: list[int]) -> None:
        self._copies, self._slot, self._versions = copies, slot, versions
        self._checked = False
        self.touched: set[str] = set()
        self.keeps: list[torch.Tensor] = []
        """Device memory that the queued copies read."""
        self.copied = copies._streams.Event()

    def before_step(self) -> None:
        """Queue everything that training does from now on after the copies. The host does not wait."""
        self._check()
        self._copies._streams.current_stream(self._copies.device).wait_event(self.copied)

    def finish(self) -> set[str]:
        """Wait until everything is in the slot, and return the names of tensors that training wrote to before their
        copy was safe.

        Blocks, so call it in a background thread.
        """
        self.copied.synchronize()
        self._check()
        for packed in (self._copies._now, self._copies._later):
            packed.copy_to_slot(self._slot)
        self.keeps = []
        return self.touched

    def _check(self) -> None:
        """Compare the version counters once, before the next step is queued after the copies: later changes are
        harmless."""
        if not self._checked:
            self._checked = True
            self.touched = self._copies._touched(self._versions)


class _Packed(NamedTuple):
    all: list[Placed]
    large: list[Placed]
    packs: list[_Pack]

    def queue(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """Queue the copies on the current stream. Return the device memory that must stay alive until they are done."""
        for placed in self.large:
            data = placed.bytes
            for begin, end in pieces(placed.offset, data.numel()):
                slot[begin:end].copy_(data[begin - placed.offset : end - placed.offset], non_blocking=True)
        keeps = []
        for pack in self.packs:
            try:
                together = torch.cat([placed.bytes for placed in pack.held])
            # training uses the device's whole memory: one transfer for each tensor needs none
            except torch.OutOfMemoryError:
                pack.copy_singly()
            else:
                pack.arrived.copy_(together, non_blocking=True)
                keeps.append(together)
        return keeps

    def copy_to_slot(self, slot: int) -> None:
        """Small tensors from where they arrived to where they belong."""
        for pack in self.packs:
            pack.small_copies.copy(slot)


def _packed(placed: Iterable[Placed], pin: Callable[[int], torch.Tensor]) -> _Packed:
    tensors = [item for item in placed if item.tensor.numel()]
    large: list[Placed] = []
    packs: list[_Pack] = []
    small: list[Placed] = []
    size = 0

    def close() -> None:
        nonlocal small, size
        if small:
            arrived, offset, moves = pin(size), 0, []
            for item in small:
                length = item.tensor.numel() * item.tensor.element_size()
                moves.append((arrived.data_ptr() + offset, length, item.offset))
                offset += length
            packs.append(_Pack(small, arrived, SmallCopies(moves)))
        small, size = [], 0

    for item in tensors:
        length = item.tensor.numel() * item.tensor.element_size()
        if length >= PACKED_BELOW:
            large.append(item)
            continue
        if size + length > PACK_BYTES:
            close()
        small.append(item)
        size += length
    close()
    return _Packed(tensors, large, packs)


def segments(view: memoryview) -> list[tuple[int, int]]:
    """Return the address and length of each segment that is pinned with one call."""
    base = address_of(view)
    return [(base + begin, end - begin) for begin, end in pieces(0, len(view))]


def pieces(offset: int, length: int) -> Iterator[tuple[int, int]]:
    """Yield the ranges of a slot in which ``length`` bytes from ``offset`` on are copied, none beyond the end of a segment.

    A copy from one pinned range into the next is an error to CUDA ("invalid argument").
    """
    end = offset + length
    while offset < end:
        stop = min(end, (offset // SEGMENT + 1) * SEGMENT)
        yield offset, stop
        offset = stop
