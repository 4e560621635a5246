"""Tensors in foreign files: their description, and sources that read their bytes in order, a slab at a time."""

from __future__ import annotations

import math
import mmap
from bisect import bisect_right
from collections.abc import Sequence
from typing import Any, NamedTuple

from relight.errors import CorruptCheckpoint, UnsafeContent
from relight.format import DTYPES
from relight.importers.crc_ranges import ChecksumRange
from relight.importers.files import Files, read_into
from relight.layout import Box, Source, check_tiling


class FileRange(NamedTuple):
    """A range of bytes of an open file. ``crc``: their recorded checksum, 0 if there is none."""

    offset: int
    length: int
    crc: int = 0


class Home(NamedTuple):
    """The file to which a range belongs."""

    files: Files
    name: str


class Spec(NamedTuple):
    """A tensor in a storage: ``offset`` and ``stride`` in elements. ``dtype`` by the format's name."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    span: FileRange
    home: Home | None = None

    @property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return DTYPES[self.dtype].itemsize

    @property
    def in_order(self) -> bool:
        """Whether its elements are contiguous, in row-major order."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.stride), strict=True):
            if extent != 1 and stride != expected:
                return False
            expected *= extent
        return True

    @property
    def length(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * self.itemsize

    @property
    def is_inside(self) -> bool:
        """Whether all of its elements are inside the storage."""
        last = self.offset + sum((extent - 1) * step for extent, step in zip(self.shape, self.stride, strict=True))
        return not self.length or (
            min((self.offset, *self.stride)) >= 0 and (last + 1) * self.itemsize <= self.span.length
        )

    def source(self) -> Source:
        """Return a source of its bytes, in row-major order. Raise ``UnsafeContent`` if some are outside its storage."""
        assert self.home is not None, "a tensor without a file"
        if not self.is_inside:
            raise UnsafeContent(
                "a tensor has elements outside its storage", where=self.home.files.where(self.home.name)
            )
        if not self.length or self.in_order:
            return FileSource(self.home, self.span.offset + self.offset * self.itemsize, self.length, self.span)
        return StridedSource(self.home, self)


class AssembledTensor(NamedTuple):
    """A tensor with bytes from any source, for example from several files."""

    dtype: str
    shape: tuple[int, ...]
    made_of: Source
    key: object
    """Equal for the same tensor."""

    def source(self) -> Source:
        """Return the source of its bytes, in row-major order."""
        return self.made_of


class Compound(NamedTuple):
    """A sparse or quantised tensor, made of several: ``kind`` and ``meta`` as in a leaf of the format."""

    kind: str
    parts: tuple[Any, ...]
    meta: Any


def row_major(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides: list[int] = []
    step = 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(extent, 1)
    return tuple(reversed(strides))


class FileSource:
    """Bytes of a file, unchanged."""

    def __init__(self, home: Home, offset: int, length: int, span: FileRange | None = None) -> None:
        self._home, self._offset, self.length = home, offset, length
        self._stretch = ChecksumRange(home.name, *span) if span is not None and span.crc else None

    def view(self) -> memoryview | None:
        """Return None: the bytes are read on demand."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read the bytes."""
        if not len(into):
            return
        with self._home.files.open(self._home.name) as handle:
            read_into(handle, self._offset + start, into, self._home.files.where(self._home.name))
        if self._stretch is not None:
            self._home.files.sums.add(self._stretch, self._offset + start - self._stretch.offset, into)


class StridedSource:
    """Elements that are not in order, gathered through a memory map of the file. Memory: the requested bytes."""

    def __init__(self, home: Home, spec: Spec) -> None:
        self._home, self._spec, self.length = home, spec, spec.length

    def view(self) -> memoryview | None:
        """Return None: the elements must be gathered."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Gather the elements."""
        import numpy as np

        spec, size = self._spec, self._spec.itemsize
        first, count = start // size, len(into) // size
        files, name = self._home
        begin = spec.span.offset - spec.span.offset % mmap.ALLOCATIONGRANULARITY
        length = spec.span.offset + spec.span.length - begin
        if begin + length > files.size(name):
            raise CorruptCheckpoint("the file ends too soon", where=files.where(name))
        with files.mapped(name, begin, length) as mapped:
            raw = np.frombuffer(mapped, np.uint8, spec.span.length, spec.span.offset - begin)
            elements = raw[: spec.span.length // size * size].view(f"V{size}")
            out = np.frombuffer(into, f"V{size}")
            for position in range(0, count, 1 << 18):
                number = np.arange(first + position, first + min(position + (1 << 18), count), dtype=np.int64)
                places = np.full(len(number), spec.offset, np.int64)
                for extent, stride in zip(reversed(spec.shape), reversed(spec.stride)):
                    number, index = np.divmod(number, extent)
                    places += index * stride
                out[position : position + len(places)] = elements[places]
            del raw, elements


class Joined:
    """Ranges of several sources, concatenated: ``(source, start in it, length)``, in bytes."""

    def __init__(self, runs: Sequence[tuple[Source, int, int]]) -> None:
        self._runs = [run for run in runs if run[2]]
        self._begins = [0]
        for _, _, length in self._runs:
            self._begins.append(self._begins[-1] + length)
        self.length = self._begins[-1]

    def view(self) -> memoryview | None:
        """Return None: the ranges are not contiguous."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read the requested bytes of each range."""
        offset = 0
        index = bisect_right(self._begins, start) - 1
        while offset < len(into):
            source, begin, length = self._runs[index]
            skip = start + offset - self._begins[index]
            take = min(length - skip, len(into) - offset)
            _copy(source, begin + skip, into[offset : offset + take])
            offset, index = offset + take, index + 1


class Tiled:
    """A tensor in boxes, each with its own source. Raise ``UnsafeContent`` unless the boxes tile the shape."""

    def __init__(self, dtype: str, shape: tuple[int, ...], boxes: Sequence[tuple[Box, Source]], where: str) -> None:
        self._size, self._shape = DTYPES[dtype].itemsize, shape
        self._boxes = [piece for piece in boxes if piece[0].elements]
        self.length = math.prod(shape) * self._size
        problems = check_tiling(shape, [box for box, _ in self._boxes])
        if problems is not None:
            raise UnsafeContent(problems, where=where)
        for box, source in self._boxes:
            if source.length != box.elements * self._size:
                raise CorruptCheckpoint(
                    f"a piece of {source.length} bytes instead of {box.elements * self._size}", where=where
                )

    def view(self) -> memoryview | None:
        """Return None: the boxes are not contiguous."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Put the pieces into their places."""
        pieces = [(box.start, box.size, source, 0) for box, source in self._boxes]
        self._range(self._shape, pieces, start // self._size, (start + len(into)) // self._size, into)

    def _range(self, shape: tuple[int, ...], pieces: list[Any], first: int, last: int, into: memoryview) -> None:
        """Fill elements ``first`` to ``last`` of a tensor of ``shape``. Each piece is ``(start, size, source, its
        first element there)``."""
        if first >= last:
            return
        if len(pieces) == 1 and tuple(pieces[0][1]) == shape:
            _copy(pieces[0][2], (pieces[0][3] + first) * self._size, into)
            return
        row = math.prod(shape[1:])
        top, end = first // row, -(-last // row)
        offset = 0
        while top < end:
            lo, hi = max(first, top * row), min(last, (top + 1) * row)
            if lo == top * row and hi == (top + 1) * row:
                stop = last // row
                length = (stop - top) * row * self._size
                self._rows(shape, pieces, top, stop, into[offset : offset + length])
                offset, top = offset + length, stop
                continue
            inner = [
                (start[1:], size[1:], source, base + (top - start[0]) * math.prod(size[1:]))
                for start, size, source, base in pieces
                if start[0] <= top < start[0] + size[0]
            ]
            length = (hi - lo) * self._size
            self._range(shape[1:], inner, lo - top * row, hi - top * row, into[offset : offset + length])
            offset, top = offset + length, top + 1

    def _rows(self, shape: tuple[int, ...], pieces: list[Any], top: int, stop: int, into: memoryview) -> None:
        """Fill whole rows of the first dimension."""
        import numpy as np

        kind = f"V{self._size}"
        target_rows = np.frombuffer(into, kind).reshape((stop - top, *shape[1:]))
        for start, size, source, base in pieces:
            lo, hi = max(top, start[0]), min(stop, start[0] + size[0])
            if lo >= hi:
                continue
            row = math.prod(size[1:])
            begin, length = (base + (lo - start[0]) * row) * self._size, (hi - lo) * row * self._size
            if tuple(size[1:]) == tuple(shape[1:]):
                offset = (lo - top) * row * self._size
                _copy(source, begin, into[offset : offset + length])
                continue
            buffer = bytearray(length)
            _copy(source, begin, memoryview(buffer))
            target = (slice(lo - top, hi - top), *(slice(a, a + n) for a, n in zip(start[1:], size[1:], strict=True)))
            target_rows[target] = np.frombuffer(buffer, kind).reshape((hi - lo, *size[1:]))


def is_tensor(value: Any) -> bool:
    """Return whether the value is a tensor, in any form."""
    return isinstance(value, (Spec, AssembledTensor))


def _copy(source: Source, start: int, into: memoryview) -> None:
    view = source.view()
    if view is not None:
        into[:] = view[start : start + len(into)]
    else:
        source.fill(start, into)
