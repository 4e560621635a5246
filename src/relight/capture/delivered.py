"""Record what a loader delivered, as a running checksum of sample indices, or of a few bytes of each batch."""

from __future__ import annotations

import ctypes
import sys
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, NamedTuple
from zlib import crc32

import torch

WHOLE_MAX, SPOTS, SPOT = 2048, 8, 64
"""Largest tensor or array, in bytes, that is read completely. Of a larger one, ``SPOTS`` places of ``SPOT`` bytes are read."""
DEPTH, PARTS_MAX = 4, 64
"""Levels of containers, and parts of one container, that a checksum of a batch reads."""


def packed(indices: Any) -> tuple[int, bytes]:
    """Return the number of samples in one entry of an index sampler, and their indices as bytes. 1 µs for 32 samples."""
    several = indices if isinstance(indices, (list, tuple)) else [indices]
    try:
        return len(several), array("q", several).tobytes()
    except (TypeError, OverflowError):  # keys that are not integers
        return len(several), b"".join(f"{key!r};".encode() for key in several)


def checksum_of(batch: Any, before: int = 0) -> int:
    """Return the checksum of ``before`` and a batch. Costs 2 to 5 µs a tensor; copies no tensor.

    It covers shapes, and each tensor and array: all of it up to ``WHOLE_MAX`` bytes, ``SPOTS * SPOT`` bytes of a
    larger one. Of a tensor on an accelerator only shape and dtype count: reading it would wait for the device.
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
        for item in value[:PARTS_MAX]:
            crc = _add(item, crc, depth + 1)
        return crc
    return crc32(type(value).__qualname__.encode(), crc)


def _add_tensor(tensor: torch.Tensor, crc: int) -> int:
    crc = crc32(f"{tensor.dtype}{tuple(tensor.shape)}".encode(), crc)
    if (
        tensor.device.type != "cpu"
        or tensor.layout != torch.strided
        or type(tensor) not in (torch.Tensor, torch.nn.Parameter)
    ):
        return crc
    if not tensor.is_contiguous():
        tensor = tensor.detach()
        while tensor.ndim and tensor.numel() > SPOT:
            tensor = tensor[0]  # a view: copying a large batch would be too slow
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


class LoaderPlace(NamedTuple):
    """A place in one iteration over a loader."""

    samples: int | None
    """Number of samples before it; None if the loader's indices are unknown."""
    crc: int
    """Checksum of them."""
    failed: int
    """Number of batches before it that could not be read, and that the loop has left out."""


class Position:
    """Progress of one iteration over a loader, in batches and samples, with a checksum. Keeps the last ``KEPT`` places."""

    KEPT = 1024

    def __init__(self, samples: int | None = 0, crc: int = 0, failed: int = 0) -> None:
        """The arguments are those of ``LoaderPlace``."""
        self.samples, self.crc, self._failed = samples, crc, failed
        self._kept = deque([LoaderPlace(samples, crc, failed)], maxlen=self.KEPT)

    def add_indices(self, count: int, data: bytes) -> None:
        """Count a delivered batch of ``count`` samples. One microsecond."""
        self._add_samples(count, data)
        self._kept.append(LoaderPlace(self.samples, self.crc, self._failed))

    def add_batch(self, batch: Any) -> None:
        """Count a delivered batch with unknown indices."""
        self.samples = None
        self.crc = checksum_of(batch, self.crc)
        self._kept.append(LoaderPlace(None, self.crc, self._failed))

    def add_failed(self, entry: tuple[int, bytes] | None) -> None:
        """Count a batch that could not be read, with its ``packed`` indices if they are known.

        It is no place of its own: until another batch is delivered, a resume tries to read it again.
        """
        self._failed += 1
        if entry is not None:
            self._add_samples(*entry)

    def before(self, batches: int) -> LoaderPlace | None:
        """Return the place as of ``batches`` batches ago; None if it is no longer known."""
        return self._kept[-1 - batches] if 0 <= batches < len(self._kept) else None

    def _add_samples(self, count: int, data: bytes) -> None:
        if self.samples is not None:
            self.samples += count
        self.crc = crc32(data, self.crc)


class IndexLists:
    """Replaces a loader's index sampler, and records its entries until the loader delivers them.

    ``noted`` receives the queue of each pass; None: nothing is recorded. ``instead``: the entries of the next pass in
    place of the index sampler's own; None: its own.
    """

    def __init__(
        self,
        inner: Any,
        noted: Callable[[deque[tuple[int, bytes]]], None] | None,
        instead: Callable[[], Iterable[Any] | None],
    ) -> None:
        self._inner, self._noted, self._instead = inner, noted, instead

    def __iter__(self) -> Iterator[Any]:
        replacement = self._instead()
        entries = iter(self._inner if replacement is None else replacement)
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
    """Iterator over an index sampler that records each entry's bytes when it is taken, as it may be changed later."""

    def __init__(self, inner: Iterator[Any], queue: deque[tuple[int, bytes]]) -> None:
        self._inner, self._queue = inner, queue

    def __iter__(self) -> _Noting:
        return self

    def __next__(self) -> Any:
        entry = next(self._inner)
        self._queue.append(packed(entry))
        return entry


class Skipped:
    """The samples of an order from ``skip`` on, and the checksum of those before."""

    def __init__(self, order: Iterable[Any], skip: int) -> None:
        self._rest: list[Any] = []
        self._order = iter(order)
        self.crc, self.done = 0, 0
        while self.done < skip:
            entry = next(self._order, _END)
            if entry is _END:
                return
            several = entry if isinstance(entry, (list, tuple)) else [entry]
            skipped, self._rest = several[: skip - self.done], list(several[skip - self.done :])
            self.crc = crc32(packed(list(skipped))[1], self.crc)
            self.done += len(skipped)

    def entries(self) -> Iterator[Any]:
        """Yield the remaining entries as the order gives them; the first may be the rest of an entry."""
        if self._rest:
            yield self._rest
        yield from self._order

    def batches(self, size: int, drop_last: bool) -> Iterator[list[Any]]:
        """Yield the rest of an order of single samples, in batches."""
        batch: list[Any] = []
        for sample in self._order:
            batch.append(sample)
            if len(batch) == size:
                yield batch
                batch = []
        if batch and not drop_last:
            yield batch


_END = object()


def is_drawn_by(before: Mapping[str, Any], after: Mapping[str, Any]) -> bool:
    """Return whether random numbers were drawn between two results of ``rng.host_states``."""
    if not torch.equal(before["torch"], after["torch"]) or not torch.equal(
        before["python"]["words"], after["python"]["words"]
    ):
        return True
    earlier, later = before.get("numpy"), after.get("numpy")
    if earlier is None or later is None or "key" not in earlier["state"]:
        return earlier is not later
    return bool(
        earlier["state"]["pos"] != later["state"]["pos"] or (earlier["state"]["key"] != later["state"]["key"]).any()
    )


def caller(depth: int) -> tuple[tuple[int, Any], FrameType]:
    """Return the identity of the Python frame that called, as its ``id`` and its code, and the frame."""
    frame = sys._getframe(depth + 1)
    return (id(frame), frame.f_code), frame


def frame_of(taker: tuple[int, Any], depth: int) -> FrameType | None:
    """Return the frame that ``caller`` identified, if it is on this thread's stack now. A microsecond for 20 frames."""
    frame: FrameType | None = sys._getframe(depth + 1)
    while frame is not None:
        if id(frame) == taker[0] and frame.f_code is taker[1]:
            return frame
        frame = frame.f_back
    return None


def sized(sizes: Sequence[int], rest: Iterable[Any]) -> Iterator[Any]:
    """Yield index entries of a stream: ``sizes`` first, then the loader's own."""
    for size in sizes:
        yield [None] * size
    yield from rest
