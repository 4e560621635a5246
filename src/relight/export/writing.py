"""Tensors on their way into files: from pieces as they are stored, in any order, from any thread, to bytes as they are wanted."""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from relight.export.convert import converted, narrowed
from relight.export.crc import joined_crc
from relight.export.outfile import OutFile
from relight.format import DTYPES


class TensorOffset(NamedTuple):
    """Where in a file a tensor begins, where its CRC32 is to stand, and what lies before it: ``(offset, bytes)``."""

    file: OutFile
    offset: int
    sums: tuple[int, ...]
    head: tuple[tuple[int, bytes], ...]


class Outgoing:
    """One tensor that is written to ``targets``: told of runs of its elements, in any order, each once."""

    def __init__(self, dtype: str, target: str, targets: Sequence[TensorOffset]) -> None:
        self._dtype, self._target, self._targets = dtype, target, targets
        self.itemsize = DTYPES[dtype].itemsize
        self._size = DTYPES[target].itemsize
        self._sums: list[tuple[int, int, int]] = []
        self._wants_sums = any(one.sums for one in targets)
        self._heads = [(one.file, *piece) for one in targets for piece in one.head]
        self.overflowed = 0

    def put(self, first: int, data: memoryview) -> None:
        """Elements from number ``first`` on."""
        self._put(first, *converted(data, self._dtype, self._target))

    def put_values(self, first: int, values: np.ndarray[Any, Any]) -> None:
        """The same, of floats that were worked out in double precision."""
        self._put(first, *narrowed(values, self._target))

    def _put(self, first: int, out: memoryview, over: int) -> None:
        self._begin()
        at = first * self._size
        for one in self._targets:
            one.file.write_at(one.offset + at, out)
        if self._wants_sums:
            self._sums.append((at, len(out), zlib.crc32(out)))
        self.overflowed += over  # of one tensor few runs come at once, and what is lost of a count is never all of it

    def _begin(self) -> None:
        """What lies before it goes with it: its block is being filled anyway."""
        with contextlib.suppress(IndexError):
            while True:
                file, offset, data = self._heads.pop()  # each by one thread
                file.write_at(offset, memoryview(data))

    def finish(self) -> None:
        """All of it was put, and every thread is done."""
        self._begin()
        if self._wants_sums:
            value = joined_crc(self._sums).to_bytes(4, "little")
            for one in self._targets:
                for at in one.sums:
                    one.file.patch(at, value)


class Straight:
    """A sink for a piece whose elements lie together in the whole tensor: on they go, as they come."""

    def __init__(self, tensor: Outgoing, first: int, elements: int) -> None:
        self._tensor, self._first = tensor, first
        self.length = elements * tensor.itemsize

    def view(self) -> memoryview | None:
        """There is none."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Write them."""
        self._tensor.put(self._first + start // self._tensor.itemsize, data)
