"""Copy an accelerator's tensors into pinned memory on a separate stream, while the next forward and backward run.

The host never waits. Tensors that training may change in the next forward are copied on training's own stream, before
the kernels that training queues next. Parameters and moments are copied on a side stream, and the next
``optimizer.step`` is queued after them. Small tensors are first packed on the device, so that many of them need one
transfer; the host copies them to their places at the end. If the slot itself is not page-locked, large tensors arrive
in memory that is, and the host copies them, too.

Any accelerator with streams: ``torch.Stream``, ``torch.Event`` and ``torch.accelerator``.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple

import torch

from relight.layout.sources import address_of
from relight.snapshot.touch_detection import SAMPLE, SmallCopies
from relight.torch_private.tensors import read_version

PACKED_BELOW = 1 << 20
PACK_BYTES = 64 << 20
SEGMENT = 256 << 20
"""Bytes to pin with one call: registering gigabytes at once fails with some drivers."""


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
    pinned host memory. ``in_place``: the slots are pinned, so large tensors are copied to them directly."""

    def __init__(
        self,
        now: Iterable[Placed],
        later: Iterable[Placed],
        device: torch.device,
        pin: Callable[[int, torch.device], torch.Tensor],
        *,
        in_place: bool,
    ) -> None:
        self.device = device
        self._now, self._later = (
            _packed(tensors, lambda size: pin(size, device), in_place) for tensors in (now, later)
        )
        self._tensors = [placed.tensor for placed in self._later.all]
        self._names = [placed.name for placed in self._later.all]
        self._side = torch.Stream(device=device)
        self._samples = _Samples(self._later.all, lambda size: pin(size, device))

    def begin(self, slot: torch.Tensor) -> DeviceSnapshot:
        """Queue all copies into ``slot``, a tensor of bytes. Return at once."""
        snapshot = DeviceSnapshot(self, slot.data_ptr(), list(map(read_version, self._tensors)))
        # on training's stream: the kernels that it queues next run after the copies
        self._now.queue(slot)
        snapshot.sampled = self._samples.queue()
        start = torch.Event(self.device.type)
        start.record(torch.accelerator.current_stream(self.device))
        self._side.wait_event(start)
        with torch.get_device_module(self.device).stream(self._side):
            self._later.queue(slot)
        snapshot.copied.record(self._side)
        return snapshot

    def _touched(self, versions: Sequence[int]) -> set[str]:
        return {
            name
            for name, tensor, then in zip(self._names, self._tensors, versions, strict=True)
            if read_version(tensor) != then
        }


class DeviceSnapshot:
    """Copies that are queued on a device."""

    def __init__(self, copies: DeviceCopies, slot: int, versions: list[int]) -> None:
        self._copies, self._slot, self._versions = copies, slot, versions
        self._checked, self._lock = False, threading.Lock()
        self.touched: set[str] = set()
        self.sampled = False
        """Whether samples of the tensors were queued, too."""
        self.copied = torch.Event(copies.device.type)

    def before_step(self) -> None:
        """Queue everything that training does from now on after the copies. The host does not wait."""
        self._check()
        torch.accelerator.current_stream(self._copies.device).wait_event(self.copied)

    def finish(self) -> set[str]:
        """Wait until everything is in the slot, and return the names of tensors that training wrote to before their
        copy was safe.

        Blocks, so call it in a background thread.
        """
        self.copied.synchronize()
        self._check()
        for packed in (self._copies._now, self._copies._later):
            packed.copy_to_slot(self._slot)
        if self.sampled:
            self.touched |= self._copies._samples.differing(self._slot)
        return self.touched

    def _check(self) -> None:
        """Compare the version counters once, before the next step is queued after the copies: later changes are
        harmless. The second of two threads waits for the first: it would otherwise let training continue too early."""
        with self._lock:
            if not self._checked:
                self.touched = self._copies._touched(self._versions)
                self._checked = True


class _Samples:
    """Samples of each tensor that is copied while training continues, read at the call, on training's stream: its first
    bytes, and the last ones if it is copied by itself, since a kernel may run in the middle of that copy.

    The copies are compared with them. The version counter alone does not suffice: torch increments it after it has queued
    the kernel that writes, and writes through ``.data`` do not increment it.
    """

    def __init__(self, placed: Sequence[Placed], pin: Callable[[int], torch.Tensor]) -> None:
        self._placed = placed
        self._places: list[tuple[str, int, int, int]] = []
        """Of each sample: the tensor's name, offset in the slot, length, offset among the samples."""
        size = 0
        for item in placed:
            for start, width in _sampled(item.tensor.nbytes):
                self._places.append((item.name, item.offset + start, width, size))
                size += width
        self._arrived = pin(size) if size else None
        self._addresses: list[int] = []
        self._ends: list[torch.Tensor] = []
        """Views of the samples, for the tensors at ``_addresses``."""

    def queue(self) -> bool:
        """Queue the samples on the current stream. Return whether there are any: without device memory there are none."""
        if self._arrived is None:
            return False
        addresses = [item.tensor.data_ptr() for item in self._placed]
        if addresses != self._addresses:  # the first time, or a tensor has other memory now
            self._ends = [
                data[start : start + width]
                for data in (item.bytes for item in self._placed)
                for start, width in _sampled(data.numel())
            ]
            self._addresses = addresses
        try:
            together = torch.cat(self._ends)
        except torch.OutOfMemoryError:
            return False
        self._arrived.copy_(together, non_blocking=True)
        return True

    def differing(self, slot: int) -> set[str]:
        """Return the names of the tensors that have other samples in the slot at address ``slot``."""
        assert self._arrived is not None
        samples = ctypes.string_at(self._arrived.data_ptr(), self._arrived.numel())
        return {
            name
            for name, offset, width, start in self._places
            if ctypes.string_at(slot + offset, width) != samples[start : start + width]
        }


def _sampled(length: int) -> list[tuple[int, int]]:
    """Return start and length of the samples of a tensor of ``length`` bytes."""
    width = min(SAMPLE, length)
    return [(0, width), (length - width, width)] if length >= PACKED_BELOW else [(0, width)]


class _Packed(NamedTuple):
    all: list[Placed]
    large: list[Placed]
    """Tensors that are copied to the slot."""
    arriving: list[tuple[Placed, torch.Tensor]]
    """Large tensors that are copied to pinned memory, because the slot is not pinned."""
    arrived: SmallCopies
    """From there to the slot."""
    packs: list[_Pack]

    def queue(self, slot: torch.Tensor) -> None:
        """Queue the copies on the current stream. A pack is made on it, too, so its memory is reused only after the copy."""
        for placed in self.large:
            data = placed.bytes
            for begin, end in pieces(placed.offset, data.numel()):
                slot[begin:end].copy_(data[begin - placed.offset : end - placed.offset], non_blocking=True)
        for placed, memory in self.arriving:
            memory.copy_(placed.bytes, non_blocking=True)
        for pack in self.packs:
            try:
                together = torch.cat([placed.bytes for placed in pack.held])
            # training uses the device's whole memory: one transfer for each tensor needs none
            except torch.OutOfMemoryError:
                pack.copy_singly()
            else:
                pack.arrived.copy_(together, non_blocking=True)

    def copy_to_slot(self, slot: int) -> None:
        """Copy what has arrived elsewhere to where it belongs."""
        self.arrived.copy(slot)
        for pack in self.packs:
            pack.small_copies.copy(slot)


def _packed(placed: Iterable[Placed], pin: Callable[[int], torch.Tensor], in_place: bool) -> _Packed:
    tensors = [item for item in placed if item.tensor.numel()]
    large = [item for item in tensors if item.tensor.nbytes >= PACKED_BELOW]
    arriving = [] if in_place else [(item, pin(item.tensor.nbytes)) for item in large]
    arrived = SmallCopies([(memory.data_ptr(), item.tensor.nbytes, item.offset) for item, memory in arriving])
    packs: list[_Pack] = []
    small: list[Placed] = []
    size = 0

    def close() -> None:
        nonlocal small, size
        if small:
            arrived, offset, moves = pin(size), 0, []
            for item in small:
                moves.append((arrived.data_ptr() + offset, item.tensor.nbytes, item.offset))
                offset += item.tensor.nbytes
            packs.append(_Pack(small, arrived, SmallCopies(moves)))
        small, size = [], 0

    for item in (item for item in tensors if item.tensor.nbytes < PACKED_BELOW):
        if size + item.tensor.nbytes > PACK_BYTES:
            close()
        small.append(item)
        size += item.tensor.nbytes
    close()
    return _Packed(tensors, large if in_place else [], arriving, arrived, packs)


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
