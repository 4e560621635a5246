"""What a loader delivered: sample indices as its sampler gave them, or a few bytes of each batch, as a running checksum."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any
from zlib import crc32

import torch

WHOLE_MAX, SPOTS, SPOT = 2048, 8, 64
"""Bytes of a tensor or array that is read whole; of a larger one, the number of places that are read, and the bytes read at each."""
DEPTH, PARTS_MAX = 4, 64
"""Levels of containers, and parts of one container, that a checksum of a batch looks at."""


def packed(indices: Any) -> tuple[int, bytes]:
    """How many samples one entry of an index sampler names, and the indices as bytes. One microsecond for 32 of them."""
    several = indices if isinstance(indices, (list, tuple)) else [indices]
    try:
        return len(several), array("q", several).tobytes()
    except (TypeError, OverflowError):  # keys of the caller's own
        return len(several), b"".join(f"{one!r};".encode() for one in several)


def checksum_of(batch: Any, before: int = 0) -> int:
    """Checksum of ``before`` and a batch: shapes, and at most ``SPOTS * SPOT`` bytes of each tensor and array. 2 to 5 µs a tensor.

    Copies no tensor. A tensor on an accelerator counts by shape and type alone: reading it would wait for the device.
    """
    return _add(batch, before, 0)


def _add(value: Any, crc: int, depth: int) -> int:
    if isinstance(value, torch.Tensor):
        return _add_tensor(value, crc)
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        return _add_array(value, crc)
    if isinstance(value, (bytes, bytearray)):
        return crc32(value[:WHOLE_MAX], crc)
    if isinstance(value, (str, int, float, bool, complex, type(None))):
        return crc32(repr(value)[:WHOLE_MAX].encode(errors="replace"), crc)
    if depth < DEPTH and isinstance(value, Mapping):
        for key in list(value)[:PARTS_MAX]:
            crc = _add(value[key], crc32(str(key).encode(errors="replace"), crc), depth + 1)
        return crc
    if depth < DEPTH and isinstance(value, (list, tuple)):
        crc = crc32(str(len(value)).encode(), crc)
        for one in value[:PARTS_MAX]:
            crc = _add(one, crc, depth + 1)
        return crc
    return crc32(type(value).__qualname__.encode(), crc)


def _add_tensor(tensor: torch.Tensor, crc: int) -> int:
    crc = crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), crc)
    if tensor.device.type != "cpu" or tensor.layout != torch.strided or type(tensor) not in (torch.Tensor, torch.nn.Parameter):
        return crc
    if not tensor.is_contiguous():
        tensor = tensor.detach()
        while tensor.ndim and tensor.numel() > SPOT:
            tensor = tensor[0]  # a view: a copy of a large batch would cost what the checksum must not
        tensor = tensor.contiguous()
    return _add_memory(tensor.data_ptr(), tensor.numel() * tensor.element_size(), crc)


def _add_array(value: Any, crc: int) -> int:
    crc = crc32(f"{value.dtype}{value.shape}".encode(), crc)
    if value.dtype.hasobject:
        return crc
    if value.ndim == 0:
        return crc32(value.tobytes(), crc)
    if not value.flags["C_CONTIGUOUS"]:
        value = value[:1].copy()
    return _add_memory(value.__array_interface__["data"][0], value.nbytes, crc)


def _add_memory(address: int, length: int, crc: int) -> int:
    if length <= WHOLE_MAX:
        return crc32(ctypes.string_at(address, length), crc) if length else crc
    step = (length - SPOT) // (SPOTS - 1)
    for spot in range(SPOTS):
        crc = crc32(ctypes.string_at(address + spot * step, SPOT), crc)
    return crc


class Position:
    """How far a pass over a loader is, in batches and samples, with the checksum of what it delivered. Knows its last ``KEPT`` places."""

    KEPT = 1024

    def __init__(self, samples: int | None = 0, crc: int = 0) -> None:
        self.samples, self.crc = samples, crc
        """``samples``: None if the loader's indices cannot be seen."""
        self._kept: deque[tuple[int | None, int]] = deque([(samples, crc)], maxlen=self.KEPT)

    def add_indices(self, count: int, data: bytes) -> None:
        """Count a delivered batch of ``count`` samples. One microsecond."""
        if self.samples is not None:
            self.samples += count
        self.crc = crc32(data, self.crc)
        self._kept.append((self.samples, self.crc))

    def add_batch(self, batch: Any) -> None:
        """Count a delivered batch whose indices are unknown."""
        self.samples = None
        self.crc = checksum_of(batch, self.crc)
        self._kept.append((None, self.crc))

    def before(self, batches: int) -> tuple[int | None, int] | None:
        """Samples and checksum as they were ``batches`` batches ago; None if that is no longer known."""
        return self._kept[-1 - batches] if 0 <= batches < len(self._kept) else None


class IndexLists:
    """Stands in for a loader's index sampler, and notes what it gives until the loader delivers it.

    ``noted`` gets the queue of each pass; None: nothing is noted. ``instead``: what the next pass gets in place of the index
    sampler's own entries; None: nothing.
    """

    def __init__(
        self, inner: Any, noted: Callable[[deque[tuple[int, bytes]]], None] | None, instead: Callable[[], Iterable[Any] | None]
    ) -> None:
        self._inner, self._noted, self._instead = inner, noted, instead

    def __iter__(self) -> Iterator[Any]:
        other = self._instead()
        entries = iter(self._inner if other is None else other)
        if self._noted is None:
            return entries
        queue: deque[tuple[int, bytes]] = deque()
        self._noted(queue)
        return _Noting(entries, queue)

    def __len__(self) -> int:
        return len(self._inner)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._inner, name)


class _Noting:
    """Iterator over an index sampler that notes each entry as it leaves. The entry may be changed afterwards, so its bytes are noted."""

    def __init__(self, inner: Iterator[Any], queue: deque[tuple[int, bytes]]) -> None:
        self._inner, self._queue = inner, queue

    def __iter__(self) -> _Noting:
        return self

    def __next__(self) -> Any:
        entry = next(self._inner)
        self._queue.append(packed(entry))
        return entry


class Skipped:
    """Samples of an order from ``skip`` on, and the checksum of those before."""

    def __init__(self, order: Iterable[Any], skip: int) -> None:
        self._rest: list[Any] = []
        self._order = iter(order)
        self.crc, self.done = 0, 0
        while self.done < skip:
            entry = next(self._order, _END)
            if entry is _END:
                return
            several = entry if isinstance(entry, (list, tuple)) else [entry]
            taken, self._rest = several[: skip - self.done], list(several[skip - self.done :])
            self.crc = crc32(packed(list(taken))[1], self.crc)
            self.done += len(taken)

    def entries(self) -> Iterator[Any]:
        """What is left, in entries as the order gives them; the first may be the rest of one."""
        if self._rest:
            yield self._rest
        yield from self._order

    def batches(self, size: int, drop_last: bool) -> Iterator[list[Any]]:
        """What is left of an order of single samples, in batches."""
        batch: list[Any] = []
        for one in self._order:
            batch.append(one)
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not drop_last:
            yield batch


_END = object()


def is_drawn_by(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Whether host generators, as ``rng.host_states`` gives them, were drawn from between the two."""
    if not torch.equal(before["torch"], after["torch"]) or not torch.equal(before["python"]["words"], after["python"]["words"]):
        return True
    one, other = before.get("numpy"), after.get("numpy")
    if one is None or other is None or "key" not in one["state"]:
        return one is not other
    return bool(one["state"]["pos"] != other["state"]["pos"] or (one["state"]["key"] != other["state"]["key"]).any())


def caller(depth: int) -> tuple[tuple[int, Any], FrameType]:
    """Identity of the Python frame that called, as its ``id`` and its code, and the frame."""
    frame = sys._getframe(depth + 1)
    return (id(frame), frame.f_code), frame


def frame_of(taker: tuple[int, Any], depth: int) -> FrameType | None:
    """The frame that ``caller`` identified, if it is on this thread's stack now. A microsecond for 20 frames."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        if id(frame) == taker[0] and frame.f_code is taker[1]:
            return frame
        frame = frame.f_back
    return None


def sized(sizes: Sequence[int], rest: Iterable[Any]) -> Iterator[Any]:
    """Index entries of a stream: ``sizes`` first, then the loader's own."""
    for size in sizes:
        yield [None] * size
    yield from rest
