"""Tensors on an accelerator: copied by a stream of their own into pinned memory, while the next forward and backward run.

The host waits for nothing. What training may change in the next forward is copied on training's own stream, behind which its next kernels
queue; parameters and moments on a side stream, behind which the next ``optimizer.step`` queues. Small tensors are first packed on the
device, so that there is one transfer for many of them, and dealt out on the host at the end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol

import torch

from relight.layout.sources import address_of
from relight.snapshot.touch_detection import SmallCopies

PACKED_BELOW = 1 << 20
PACK_BYTES = 64 << 20
SEGMENT = 256 << 20
"""Pinned at once: a single registration of gigabytes fails with some drivers."""


class Streams(Protocol):
    """What is used of ``torch.cuda``; ``torch.xpu`` has the same. Tests bring one that writes down what it is asked for."""

    def current_stream(self, device: Any = None) -> Any:
        """The stream that training queues its kernels on."""

    def stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Queue on ``stream`` inside."""

    def Stream(self, device: Any = None) -> Any:  # noqa: N802
        """A new stream."""

    def Event(self) -> Any:  # noqa: N802
        """A new event."""


class Placed(NamedTuple):
    """A contiguous device tensor, and its offset in a slot."""

    name: str
    tensor: torch.Tensor
    offset: int

    @property
    def bytes(self) -> torch.Tensor:
        """Its memory as a flat run of bytes; no copy."""
        return self.tensor.detach().reshape(-1).view(torch.uint8)


class _Pack(NamedTuple):
    """Small tensors that cross over together, and the pinned memory they arrive in."""

    held: list[Placed]
    arrived: torch.Tensor
    dealt: SmallCopies


class DeviceCopies:
    """The tensors of one device, ready to be copied again and again. ``pin`` gives pinned host memory of so many bytes."""

    def __init__(
        self,
        now: Iterable[Placed],
        later: Iterable[Placed],
        device: torch.device,
        streams: Streams,
        pin: Callable[[int], torch.Tensor],
    ) -> None:
        self.device, self._streams = device, streams
        self._now, self._later = _packed(now, pin), _packed(later, pin)
        self._tensors = [placed.tensor for placed in self._later.all]
        self._names = [placed.name for placed in self._later.all]
        self._side = streams.Stream(device)

    def begin(self, slot: torch.Tensor) -> DeviceSnapshot:
        """Queue all copies into ``slot``, pinned bytes. Returns at once."""
        streams = self._streams
        snapshot = DeviceSnapshot(self, slot.data_ptr(), [tensor._version for tensor in self._tensors])
        snapshot.keeps += self._now.queue(slot)  # on training's stream: what it queues next comes behind
        start = streams.Event()
        start.record(streams.current_stream(self.device))
        self._side.wait_event(start)
        with streams.stream(self._side):
            snapshot.keeps += self._later.queue(slot)
        snapshot.copied.record(self._side)
        return snapshot

    def _touched(self, versions: Sequence[int]) -> set[str]:
        return {name for name, tensor, then in zip(self._names, self._tensors, versions, strict=True) if tensor._version != then}


class DeviceSnapshot:
    """Copies that are queued."""

    def __init__(self, copies: DeviceCopies, slot: int, versions: list[int]) -> None:
        self._copies, self._slot, self._versions = copies, slot, versions
        self._checked = False
        self.touched: set[str] = set()
        self.keeps: list[torch.Tensor] = []
        """Device memory that the queued copies read."""
        self.copied = copies._streams.Event()

    def before_step(self) -> None:
        """Have what training queues from here on come behind the copies. The host goes on."""
        self._check()
        self._copies._streams.current_stream(self._copies.device).wait_event(self.copied)

    def finish(self) -> set[str]:
        """Wait, in a thread that may, until all of it is in the slot; the names of what training wrote to before the copy was safe."""
        self.copied.synchronize()
        self._check()
        for one in (self._copies._now, self._copies._later):
            one.deal(self._slot)
        self.keeps = []
        return self.touched

    def _check(self) -> None:
        """Versions count until the next step is queued behind the copies; after that they move, and may."""
        if not self._checked:
            self._checked = True
            self.touched = self._copies._touched(self._versions)


class _Packed(NamedTuple):
    all: list[Placed]
    large: list[Placed]
    packs: list[_Pack]

    def queue(self, slot: torch.Tensor) -> list[torch.Tensor]:
        """On the current stream. Gives the device memory that is to stay."""
        for placed in self.large:
            data = placed.bytes
            slot[placed.offset : placed.offset + data.numel()].copy_(data, non_blocking=True)
        keeps = []
        for pack in self.packs:
            together = torch.cat([placed.bytes for placed in pack.held])
            pack.arrived.copy_(together, non_blocking=True)
            keeps.append(together)
        return keeps

    def deal(self, slot: int) -> None:
        """Small tensors from where they arrived to where they belong."""
        for pack in self.packs:
            pack.dealt.copy(slot)


def _packed(placed: Iterable[Placed], pin: Callable[[int], torch.Tensor]) -> _Packed:
    every = [one for one in placed if one.tensor.numel()]
    large: list[Placed] = []
    packs: list[_Pack] = []
    small: list[Placed] = []
    size = 0

    def close() -> None:
        nonlocal small, size
        if small:
            arrived, at, moves = pin(size), 0, []
            for one in small:
                length = one.tensor.numel() * one.tensor.element_size()
                moves.append((arrived.data_ptr() + at, length, one.offset))
                at += length
            packs.append(_Pack(small, arrived, SmallCopies(moves)))
        small, size = [], 0

    for one in every:
        length = one.tensor.numel() * one.tensor.element_size()
        if length >= PACKED_BELOW:
            large.append(one)
            continue
        if size + length > PACK_BYTES:
            close()
        small.append(one)
        size += length
    close()
    return _Packed(every, large, packs)


def pin_slot(view: memoryview, register: Callable[[int, int], int]) -> bool:
    """Pin a slot's memory for this process, by segments. ``register`` is ``cudaHostRegister`` but for its flags; False if it refuses."""
    return all(register(address, length) == 0 for address, length in segments(view))


def segments(view: memoryview) -> list[tuple[int, int]]:
    """What is pinned at once: address and length of each piece."""
    begin = address_of(view)
    return [(begin + at, min(SEGMENT, len(view) - at)) for at in range(0, len(view), SEGMENT)]
