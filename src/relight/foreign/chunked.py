"""Arrays that are cut into chunks of one shape, each coded by itself: what zarr 2 and 3 have in common."""

from __future__ import annotations

import math
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from itertools import product
from typing import Any

from relight.errors import CorruptCheckpoint, UnsafeContent
from relight.foreign.tensors import Tiled, Whole
from relight.format import DTYPES
from relight.layout import Box

CHUNK_BYTES_MAX = 1 << 30
CHUNKS_MAX = 1_000_000
CODED_MORE = 1 << 16
"""By how much coding may make a chunk longer."""
_HELD_BYTES = 64 << 20
Reader = Callable[[Box], bytes]


def chunked_array(dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], read: Reader, where: str) -> Whole:
    """An array of such chunks. ``read`` gives the bytes of one, which at the array's edges are those that are in it."""
    size = DTYPES[dtype].itemsize
    boxes = boxes_of(shape, chunks, dtype, where)
    held = _Held(read, max(1, _HELD_BYTES // max(1, math.prod(chunks) * size)))
    return Whole(dtype, shape, Tiled(dtype, shape, [(box, _ChunkSource(held, box, size)) for box in boxes], where), ("array", where))


def boxes_of(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, where: str) -> list[Box]:
    """The chunks' places, those at the edges cut. ``UnsafeContent`` for absurdly many, or large ones."""
    if any(one < 1 for one in chunks) or math.prod(chunks) * DTYPES[dtype].itemsize > CHUNK_BYTES_MAX:
        raise UnsafeContent("chunks of no, or of more than a gigabyte", where=where)
    counts = [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
    if math.prod(counts) > CHUNKS_MAX:
        raise UnsafeContent(f"{math.prod(counts)} chunks", where=where)
    found = []
    for numbers in product(*map(range, counts)):
        start = tuple(number * step for number, step in zip(numbers, chunks, strict=True))
        found.append(Box(start, tuple(min(step, extent - at) for step, extent, at in zip(chunks, shape, start, strict=True))))
    return found


def numbers_of(value: Any, where: str) -> tuple[int, ...]:
    """A shape, checked."""
    if not isinstance(value, list) or len(value) > 64 or any(type(one) is not int or not 0 <= one < 2**62 for one in value):
        raise UnsafeContent("an impossible shape", where=where)
    return tuple(value)


def unpacked(data: bytes, size: int, where: str) -> bytes:
    """What zstd has packed: no more than one byte above ``size``, which whoever counts them notices."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    try:
        found: bytes = zstd.ZstdDecompressor().decompress(data, max_length=size + 1)
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise CorruptCheckpoint(f"a chunk that cannot be unpacked: {str(error)[:80]}", where=where) from None
    return found


def clipped(data: bytes, chunks: tuple[int, ...], box: Box, dtype: str, where: str) -> bytes:
    """Of a chunk, which is whole at the array's edges too, what is in the array."""
    import numpy as np

    size = DTYPES[dtype].itemsize
    if len(data) != math.prod(chunks) * size:
        raise CorruptCheckpoint(f"a chunk of {len(data)} bytes, where {math.prod(chunks) * size} belong", where=where)
    if box.size == chunks:
        return data
    held = np.frombuffer(data, f"V{size}").reshape(chunks)
    return np.ascontiguousarray(held[tuple(slice(extent) for extent in box.size)]).tobytes()


class _Held:
    """A few chunks that were read last, so that none is unpacked for each slab that it is in."""

    def __init__(self, read: Reader, count: int) -> None:
        self._read, self._count = read, count
        self._held: OrderedDict[Box, bytes] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, box: Box) -> bytes:
        """A chunk's bytes."""
        with self._lock:
            if box in self._held:
                self._held.move_to_end(box)
                return self._held[box]
            data = self._read(box)
            self._held[box] = data
            while len(self._held) > self._count:
                self._held.popitem(last=False)
            return data


class _ChunkSource:
    """One chunk's part of the array."""

    def __init__(self, held: _Held, box: Box, itemsize: int) -> None:
        self._held, self._box, self.length = held, box, box.elements * itemsize

    def view(self) -> memoryview | None:
        """None: it is read when it is wanted."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read and unpack it."""
        data = self._held.get(self._box)
        if len(data) != self.length:
            raise CorruptCheckpoint("a chunk of another length than it should be")
        into[:] = data[start : start + len(into)]
