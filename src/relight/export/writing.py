"""Write tensors to files: convert their pieces, which arrive in any order from any thread, to the target dtype."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relight.export.convert import converted, narrowed
from relight.export.outfile import OutFile
from relight.format import DTYPES
from relight.format.crc import crc32, joined_crc


class TensorOffset(NamedTuple):
    """Offset of a tensor in a file, offsets of its CRC32, and the fixed bytes before it: ``(offset, bytes)``."""

    file: OutFile
    offset: int
    sums: tuple[int, ...]
    head: tuple[tuple[int, bytes], ...]


class Outgoing:
    """A tensor that is written to ``targets``. Receives runs of its elements, in any order, each once."""

    def __init__(self, dtype: str, target: str, targets: Sequence[TensorOffset]) -> None:
        self._dtype, self._target, self._targets = dtype, target, targets
        self.itemsize = DTYPES[dtype].itemsize
        self._size = DTYPES[target].itemsize
        self._sums: list[tuple[int, int, int]] = []
        self._wants_sums = any(place.sums for place in targets)
        self._heads = [(place.file, *piece) for place in targets for piece in place.head]
        self.overflowed = 0

    def put(self, first: int, data: memoryview) -> None:
        """Write elements from number ``first`` on."""
        self._put(first, *converted(data, self._dtype, self._target))

    def put_values(self, first: int, values: np.ndarray[Any, Any]) -> None:
        """Write elements that were computed in double precision."""
        self._put(first, *narrowed(values, self._target))

    def _put(self, first: int, out: memoryview, over: int) -> None:
        self._begin()
        start = first * self._size
        for place in self._targets:
            place.file.write_at(place.offset + start, out)
        if self._wants_sums:
            self._sums.append((start, len(out), crc32(out)))
        self.overflowed += (
            over  # not locked: concurrent runs of one tensor are few, and a lost update never hides all overflows
        )

    def _begin(self) -> None:
        """Write the fixed bytes before the tensor: the block that has them is being filled now."""
        with contextlib.suppress(IndexError):
            while True:
                file, offset, data = self._heads.pop()  # pop is atomic: each is written by one thread
                file.write_at(offset, memoryview(data))

    def finish(self) -> None:
        """Write the CRC32s. Call it when all elements were put and every thread is done."""
        self._begin()
        if self._wants_sums:
            value = joined_crc(self._sums).to_bytes(4, "little")
            for place in self._targets:
                for offset in place.sums:
                    place.file.patch(offset, value)


class Straight:
    """Sink for a piece that is contiguous in the whole tensor: forwards the elements as they arrive."""

    def __init__(self, tensor: Outgoing, first: int, elements: int) -> None:
        self._tensor, self._first = tensor, first
        self.length = elements * tensor.itemsize

    def view(self) -> memoryview | None:
        """Return None: there is no memory to read into."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Write a run of elements."""
        self._tensor.put(self._first + start // self._tensor.itemsize, data)
