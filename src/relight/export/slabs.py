"""Tensors a slab at a time, in order, whoever holds their pieces and however these lie: what memory is needed is a slab's."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from relight.catalog.opened import Opened
from relight.catalog.read import read_tensors
from relight.catalog.whole import Whole
from relight.export.writing import Across, straight_run
from relight.format import DTYPES
from relight.layout import Box, Sink
from relight.layout.shards import intersection

ELEMENTS = 4 << 20
"""In a slab, or in several of small tensors that are read together."""


class Slab(NamedTuple):
    """``length`` elements of tensor ``tensor``, from number ``first`` on."""

    tensor: int
    first: int
    length: int


def batches(whole: Whole, numbers: Sequence[int], undivided: Collection[int] = ()) -> Iterator[list[Slab]]:
    """Slabs of those tensors, as many at once as ``ELEMENTS`` allows, and of each tensor at most one. One that pieces lie across is cut at
    rows; ``undivided`` ones are not cut."""
    batch: list[Slab] = []
    held = 0
    for number in numbers:
        shape = whole.tensors[number].shape
        total = math.prod(shape)
        step = max(total, 1) if number in undivided else _step(whole, number)
        for first in range(0, total, step):
            slab = Slab(number, first, min(step, total - first))
            if batch and (held + slab.length > ELEMENTS or batch[-1].tensor == number):
                yield batch
                batch, held = [], 0
            batch.append(slab)
            held += slab.length
    if batch:
        yield batch


def is_straight(whole: Whole, number: int) -> bool:
    """Whether each of its pieces is a run of its elements."""
    shape = whole.tensors[number].shape
    return all(straight_run(piece.box, shape) is not None for piece in whole.pieces[number])


def _step(whole: Whole, number: int) -> int:
    if is_straight(whole, number):
        return ELEMENTS
    row = math.prod(whole.tensors[number].shape[1:])
    return max(ELEMENTS // row, 1) * row


class _Window:
    """A sink for a run of a piece: memory."""

    def __init__(self, memory: memoryview, skip: int) -> None:
        self._memory, self.skip = memory, skip
        self.length = len(memory)

    def view(self) -> memoryview | None:
        """The memory."""
        return self._memory

    def absorb(self, start: int, data: memoryview) -> None:
        """Copy in."""
        self._memory[start : start + len(data)] = data


def read_slabs(opened: Opened, whole: Whole, slabs: Sequence[Slab], progress: Callable[[int], None] | None = None) -> list[memoryview]:
    """Their bytes, verified."""
    sinks: list[dict[int, Sink]] = [{} for _ in opened.parts]
    found = []
    for slab in slabs:
        tensor = whole.tensors[slab.tensor]
        size = DTYPES[tensor.dtype].itemsize
        straight = is_straight(whole, slab.tensor)
        read = slab if straight else _rows_around(slab, math.prod(tensor.shape[1:]))
        memory = np.zeros(read.length * size, np.uint8)
        found.append(memory.data[(slab.first - read.first) * size :][: slab.length * size])
        for piece in whole.pieces[slab.tensor]:
            sink = (_of_run if straight else _of_rows)(memory, read, piece.box, tensor.shape, size)
            if sink is not None:
                sinks[piece.part][piece.tensor] = sink
    for part, held in zip(opened.parts, sinks, strict=True):
        if held:
            read_tensors(opened, part, held, progress=progress)
    return found


def _rows_around(slab: Slab, row: int) -> Slab:
    first = slab.first // row * row
    return Slab(slab.tensor, first, -(-(slab.first + slab.length) // row) * row - first)


def _of_run(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], slab: Slab, box: Box, shape: tuple[int, ...], size: int) -> Sink | None:
    begin = straight_run(box, shape)
    assert begin is not None
    first, last = max(begin, slab.first), min(begin + box.elements, slab.first + slab.length)
    if first >= last:
        return None
    return _Window(memory.data[(first - slab.first) * size : (last - slab.first) * size], (first - begin) * size)


def _of_rows(memory: np.ndarray[tuple[int], np.dtype[np.uint8]], slab: Slab, box: Box, shape: tuple[int, ...], size: int) -> Sink | None:
    row = math.prod(shape[1:])
    first, rows = slab.first // row, slab.length // row
    shared = intersection(box, Box((first, *(0 for _ in shape[1:])), (rows, *shape[1:])))
    if shared is None:
        return None
    array = memory.reshape(rows, *shape[1:], size)
    within = Box((shared.start[0] - first, *shared.start[1:]), shared.size)
    return Across(array, within, size, (shared.start[0] - box.start[0]) * math.prod(box.size[1:]) * size)
