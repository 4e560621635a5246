"""Read slabs: runs of a tensor's elements in its global order, however many pieces it is stored in.

For callers that read a checkpoint in bounded memory, or two checkpoints in step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from relight.format import DTYPES
from relight.layout import Box, RangeSink, Sink
from relight.layout.chunks import CHUNK_BYTES
from relight.layout.shards import boxes_of_run, intersection, placed, run_of
from relight.reader.chunk_reader import Progress, read_tensors
from relight.reader.merged_parts import MergedCheckpoint
from relight.reader.opened import Opened
from relight.store import page_buffer

SLAB_BYTES = 4 * CHUNK_BYTES
_Bytes = np.ndarray[Any, np.dtype[np.uint8]]


class Slab(NamedTuple):
    """``length`` elements of tensor number ``tensor`` of a ``MergedCheckpoint``, from element ``first`` on."""

    tensor: int
    first: int
    length: int


def straight_run(box: Box, shape: Sequence[int]) -> int | None:
    """Return the first element of ``box`` in a tensor of ``shape`` if the box is contiguous there; else None."""
    if not shape:
        return 0
    first, last = run_of(box, shape)
    return first if last - first == math.prod(box.size) else None


def is_straight(joined: MergedCheckpoint, tensor: int) -> bool:
    """Return whether each piece of a tensor is contiguous in it."""
    shape = joined.tensors[tensor].shape
    return all(straight_run(piece.box, shape) is not None for piece in joined.pieces[tensor])


def slabs_of(shape: Sequence[int], tensor: int, *, by_rows: bool, at_most: int) -> Iterator[Slab]:
    """Yield the slabs of one tensor, in order, of at most ``at_most`` elements each. ``by_rows``: of whole rows, at least one."""
    total = math.prod(shape)
    row = math.prod(shape[1:]) if by_rows and shape else 1
    step = max(at_most // max(row, 1), 1) * max(row, 1)
    for first in range(0, total, step):
        yield Slab(tensor, first, min(step, total - first))


def batches(slabs: Iterator[Slab], weight_of: Sequence[int], at_most: int) -> Iterator[list[Slab]]:
    """Yield batches of slabs to read together: at most one slab of each tensor, and a total weight of at most ``at_most``, or one slab.

    A slab's weight is its number of elements times ``weight_of`` its tensor.
    """
    batch: list[Slab] = []
    weight_total = 0
    for slab in slabs:
        weight = slab.length * weight_of[slab.tensor]
        if batch and (weight_total + weight > at_most or batch[-1].tensor == slab.tensor):
            yield batch
            batch, weight_total = [], 0
        batch.append(slab)
        weight_total += weight
    if batch:
        yield batch


class SlabWindow(RangeSink):
    """Sink in memory for a run of a piece, from its byte ``skip`` on."""

    def __init__(self, memory: memoryview, skip: int) -> None:
        self._memory, self.skip, self.length = memory, skip, len(memory)

    def view(self) -> memoryview | None:
        """Return the memory."""
        return self._memory

    def absorb(self, start: int, data: memoryview) -> None:
        """Copy bytes into the memory."""
        self._memory[start : start + len(data)] = data


class Across(RangeSink):
    """Sink for a piece, or a run of it from byte ``skip`` on: a ``box`` of an array. The array's last dimension is an element's bytes."""

    def __init__(self, array: _Bytes, box: Box, itemsize: int, skip: int) -> None:
        self._array, self._box, self._itemsize = array, box, itemsize
        self.skip = skip
        self.length = box.elements * itemsize

    def view(self) -> memoryview | None:
        """Return None: the box is not contiguous memory."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Copy the bytes of whole elements into the box."""
        size, position = self._itemsize, 0
        for run in boxes_of_run(self._box.size, start // size, (start + len(data)) // size):
            box = placed(run, self._box)
            length = box.elements * size
            where = tuple(slice(begin, begin + extent) for begin, extent in zip(box.start, box.size, strict=True))
            self._array[where] = np.frombuffer(data[position : position + length], np.uint8).reshape(*box.size, size)
            position += length


class SlabReader:
    """Reads slabs of one checkpoint, batch after batch. A batch is valid until the second batch after it is read."""

    def __init__(self, opened: Opened, joined: MergedCheckpoint, *, batch_bytes: int = SLAB_BYTES) -> None:
        self._opened, self._joined, self._bytes = opened, joined, batch_bytes
        self._rooms: list[memoryview] = []
        self._held: list[memoryview] = []

    def read(self, batch: Sequence[Slab], progress: Progress | None = None) -> list[memoryview]:
        """Return the verified bytes of each slab. Raise ``CorruptCheckpoint`` as ``read_tensors`` does.

        Memory: two batches, and what reading takes. If a tensor's pieces are not contiguous, a slab's first and last row are read whole.
        """
        slabs_to_read = [self._around(slab) for slab in batch]
        sizes = [slab.length * self._itemsize(slab) for slab in slabs_to_read]
        buffer = self._room(sum(sizes))
        ends = list(accumulate(sizes))
        into = [buffer[end - size : end] for end, size in zip(ends, sizes, strict=True)]
        sinks: list[dict[int, Sink]] = [{} for _ in self._opened.parts]
        for slab, memory in zip(slabs_to_read, into, strict=True):
            self._ask(slab, memory, sinks)
        for part, wanted in zip(self._opened.parts, sinks, strict=True):
            if wanted:
                read_tensors(self._opened, part, wanted, progress=progress, rooms=self._rooms)
        skips = [
            (slab.first - read.first) * self._itemsize(slab) for slab, read in zip(batch, slabs_to_read, strict=True)
        ]
        return [
            memory[skip:][: slab.length * self._itemsize(slab)]
            for slab, memory, skip in zip(batch, into, skips, strict=True)
        ]

    def _itemsize(self, slab: Slab) -> int:
        return DTYPES[self._joined.tensors[slab.tensor].dtype].itemsize

    def _room(self, size: int) -> memoryview:
        if size > self._bytes:
            return page_buffer(size)
        buffer = self._held.pop(0) if len(self._held) > 1 else page_buffer(self._bytes)
        self._held.append(buffer)
        return buffer

    def _around(self, slab: Slab) -> Slab:
        """Extend a slab to whole rows if the tensor's pieces are not contiguous."""
        if not slab.length or is_straight(self._joined, slab.tensor):
            return slab
        row = math.prod(self._joined.tensors[slab.tensor].shape[1:])
        first = slab.first // row * row
        return Slab(slab.tensor, first, -(-(slab.first + slab.length) // row) * row - first)

    def _ask(self, slab: Slab, memory: memoryview, sinks: list[dict[int, Sink]]) -> None:
        shape, size = self._joined.tensors[slab.tensor].shape, self._itemsize(slab)
        sink_for = _of_run if is_straight(self._joined, slab.tensor) else _of_rows
        for piece in self._joined.pieces[slab.tensor] if slab.length else ():
            sink = sink_for(memory, slab, piece.box, shape, size)
            if sink is not None:
                sinks[piece.part][piece.tensor] = sink


def _of_run(memory: memoryview, slab: Slab, box: Box, shape: tuple[int, ...], size: int) -> Sink | None:
    begin = straight_run(box, shape)
    assert begin is not None
    first, last = max(begin, slab.first), min(begin + box.elements, slab.first + slab.length)
    if first >= last:
        return None
    return SlabWindow(memory[(first - slab.first) * size : (last - slab.first) * size], (first - begin) * size)


def _of_rows(memory: memoryview, slab: Slab, box: Box, shape: tuple[int, ...], size: int) -> Sink | None:
    row = math.prod(shape[1:])
    first, rows = slab.first // row, slab.length // row
    shared = intersection(box, Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    if shared is None:
        return None
    array = np.frombuffer(memory, np.uint8).reshape(rows, *shape[1:], size)
    within = Box((shared.start[0] - first, *shared.start[1:]), shared.size)
    return Across(array, within, size, (shared.start[0] - box.start[0]) * math.prod(box.size[1:]) * size)
