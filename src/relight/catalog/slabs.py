"""Runs of tensors' elements, in the tensors' global order, however many pieces they are stored in: for those who go through a checkpoint
in bounded memory, or through two side by side."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

from relight.catalog.opened import Opened
from relight.catalog.read import read_tensors
from relight.catalog.whole import Stored, Whole
from relight.format import DTYPES
from relight.layout import Sink, whole
from relight.layout.chunks import CHUNK_BYTES
from relight.store import page_buffer

SLAB_BYTES = 4 * CHUNK_BYTES


class Slab(NamedTuple):
    """``length`` elements of tensor number ``tensor`` of a ``Whole``, from element ``first`` on."""

    tensor: int
    first: int
    length: int


class _Run:
    """A sink for a run of one stored piece."""

    def __init__(self, buffer: memoryview, skip: int) -> None:
        self.buffer, self.skip, self.length = buffer, skip, len(buffer)

    def view(self) -> memoryview:
        """All of it."""
        return self.buffer

    def absorb(self, start: int, data: memoryview) -> None:
        """Unused: it has memory."""
        self.buffer[start : start + len(data)] = data


def slabs_of(shape: Sequence[int], itemsize: int, tensor: int, *, by_rows: bool, at_most: int = SLAB_BYTES) -> Iterator[Slab]:
    """The slabs of one tensor, in order, each of at most that many bytes; whole rows if ``by_rows``, and then at least one of them."""
    total = math.prod(shape)
    row = math.prod(shape[1:]) if by_rows and shape else 1
    step = max(1, at_most // max(1, itemsize * row)) * row
    for first in range(0, total, max(step, 1)):
        yield Slab(tensor, first, min(step, total - first))


def in_pieces(joined: Whole, tensor: int) -> bool:
    """Whether the tensor is stored as several boxes."""
    found = joined.pieces[tensor]
    return len(found) > 1 or (len(found) == 1 and found[0].box != whole(joined.tensors[tensor].shape))


def batches(slabs: Iterator[Slab], itemsize_of: Sequence[int], at_most: int = SLAB_BYTES) -> Iterator[list[Slab]]:
    """Slabs that are read together: no tensor twice in one batch."""
    batch: list[Slab] = []
    held = 0
    for one in slabs:
        length = one.length * itemsize_of[one.tensor]
        if batch and (held + length > at_most or any(other.tensor == one.tensor for other in batch[-1:])):
            yield batch
            batch, held = [], 0
        batch.append(one)
        held += length
    if batch:
        yield batch


class SlabReader:
    """Slabs of one checkpoint, batch after batch. What it has read is valid until the batch after the next one is read."""

    def __init__(self, opened: Opened, joined: Whole, *, batch_bytes: int = SLAB_BYTES, readers: int | None = None) -> None:
        self._opened, self._joined, self._bytes, self._readers = opened, joined, batch_bytes, readers
        self._rooms: list[memoryview] = []
        self._held: list[memoryview] = []

    def read(self, batch: Sequence[Slab]) -> list[memoryview]:
        """The bytes of each, verified. ``CorruptCheckpoint`` as ``read_tensors``. Memory: two batches, twice those of tensors that lie in
        pieces, and what reading takes."""
        sizes = [one.length * DTYPES[self._joined.tensors[one.tensor].dtype].itemsize for one in batch]
        room = self._held.pop(0) if len(self._held) > 1 else page_buffer(self._bytes)
        self._held.append(room)
        if sum(sizes) > len(room):
            room = page_buffer(sum(sizes))
        ends = list(accumulate(sizes))
        into = [room[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        _read(self._opened, self._joined, batch, into, self._readers, self._rooms)
        return into


def _read(
    opened: Opened, joined: Whole, batch: Sequence[Slab], into: Sequence[memoryview], readers: int | None, rooms: list[memoryview]
) -> None:
    import numpy as np

    sinks: list[dict[int, Sink]] = [{} for _ in opened.parts]
    scattered: list[tuple[Any, Any, Any]] = []
    for one, held in zip(batch, into, strict=True):
        tensor = joined.tensors[one.tensor]
        size = DTYPES[tensor.dtype].itemsize
        if not one.length:
            continue
        if not in_pieces(joined, one.tensor):
            (piece,) = joined.pieces[one.tensor]
            sinks[piece.part][piece.tensor] = _Run(held, one.first * size)
            continue
        row = math.prod(tensor.shape[1:])
        rows = np.frombuffer(held, np.uint8).reshape(one.length // row, *tensor.shape[1:], size)
        for piece in joined.pieces[one.tensor]:
            _piece(piece, one.first // row, rows, size, sinks, scattered)
    for part, wanted in zip(opened.parts, sinks, strict=True):
        if wanted:
            read_tensors(opened, part, wanted, readers=readers, rooms=rooms)
    for rows, where, piece_held in scattered:
        rows[where] = piece_held


def _piece(piece: Stored, top: int, rows: Any, size: int, sinks: list[dict[int, Sink]], scattered: list[tuple[Any, Any, Any]]) -> None:
    """What of a stored piece belongs into ``rows``, which begin with row ``top`` of the tensor."""
    import numpy as np

    box = piece.box
    first, last = max(top, box.start[0]), min(top + len(rows), box.start[0] + box.size[0])
    if first >= last or not box.elements:
        return
    each = math.prod(box.size[1:]) * size
    held = np.empty((last - first, *box.size[1:], size), np.uint8)
    sinks[piece.part][piece.tensor] = _Run(held.reshape(-1).data, (first - box.start[0]) * each)
    where = (slice(first - top, last - top), *(slice(a, a + n) for a, n in zip(box.start[1:], box.size[1:], strict=True)))
    scattered.append((rows, where, held))
