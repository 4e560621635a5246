"""Arrays that are cut into chunks of one shape, each coded by itself: what zarr 2 and 3 have in common."""

from __future__ import annotations

import io
import math
import mmap
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from itertools import product
from typing import TYPE_CHECKING, Any

from relight.errors import CorruptCheckpoint, NoSpace, UnsafeContent
from relight.format import DTYPES
from relight.importers.files import PIECE_BYTES, SLAB_BYTES
from relight.importers.held import ValueCache
from relight.importers.tensors import AssembledTensor, Tiled
from relight.layout import Box

CHUNK_BYTES_MAX = 1 << 30
CHUNKS_MAX = 1_000_000
CODED_MORE = 1 << 16
"""By how much coding may make a chunk longer."""
WINDOW_LOG_MAX = 25
"""Of a zstd frame: 32 MiB. Only levels 21 and 22 ask for more."""
if TYPE_CHECKING:
    import numpy as np

    Elements = np.ndarray[Any, np.dtype[np.void]]
Reader = Callable[[Box], "Elements"]


def chunked_array(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], read: Reader, where: str, held: ValueCache
) -> AssembledTensor:
    """An array of such chunks. ``read`` gives the elements of one, which at the array's edges are those that are in it."""
    size = DTYPES[dtype].itemsize
    boxes = boxes_of(shape, chunks, dtype, where)
    reads = _Chunks(read, held, where)
    return AssembledTensor(
        dtype, shape, Tiled(dtype, shape, [(box, _ArrayChunkSource(reads, box, size)) for box in boxes], where), ("array", where)
    )


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


def elements_of(pieces: Iterator[bytes], zstd: bool, chunks: tuple[int, ...], box: Box, dtype: str, where: str) -> Elements:
    """A chunk's elements that are in the array, of shape ``box.size``. ``pieces``: its bytes in the file, in order.

    ``CorruptCheckpoint`` if they are not as many as belong there. A chunk larger than a slab is decoded into an unlinked temporary file
    and mapped: memory stays within a piece and zstd's window of at most ``2**WINDOW_LOG_MAX`` bytes. ``NoSpace`` without room for that.
    """
    import numpy as np

    size, at = math.prod(chunks) * DTYPES[dtype].itemsize, 0
    decoded = _decoded(pieces, where) if zstd else pieces
    try:
        with tempfile.TemporaryFile(prefix="relight-") if size > SLAB_BYTES else io.BytesIO() as room:
            for piece in decoded:
                at += len(piece)
                if at > size:
                    break
                room.write(piece)
            if at != size:
                found = f"more than {size}" if at > size else f"{at}"
                raise CorruptCheckpoint(f"a chunk of {found} bytes, where {size} belong", where=where)
            room.flush()
            data = room.getvalue() if isinstance(room, io.BytesIO) else mmap.mmap(room.fileno(), size, prot=mmap.PROT_READ)
    except OSError as error:
        hint = f"make room in {tempfile.gettempdir()}, or name another directory: TMPDIR"
        raise NoSpace(f"a chunk of {size:,} bytes cannot be decoded here: {error.strerror}", where=where, hint=hint) from error
    held = np.frombuffer(data, f"V{DTYPES[dtype].itemsize}").reshape(chunks)
    inside: tuple[Any, ...] = (..., *(slice(extent) for extent in box.size))
    clipped: Elements = held[inside]
    return clipped


def _decoded(pieces: Iterator[bytes], where: str) -> Iterator[bytes]:
    """One zstd frame's content, piece by piece."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    try:
        for piece in pieces:
            given = piece
            while not decompressor.eof:
                found = decompressor.decompress(given, max_length=PIECE_BYTES)
                if found:
                    yield found
                given = b""
                if decompressor.needs_input:
                    break
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise CorruptCheckpoint(f"a chunk that cannot be unpacked: {str(error)[:80]}", where=where) from None


class _Chunks:
    """The chunks of one array. None is decoded for each slab that it is in, nor by two threads at once."""

    def __init__(self, read: Reader, held: ValueCache, where: str) -> None:
        self._read, self._held, self._where = read, held, where
        self._lock = threading.Lock()

    def get(self, box: Box) -> Elements:
        """A chunk's elements."""
        with self._lock:
            found: Elements = self._held.get((self._where, box), lambda: self._read(box), lambda one: int(_owner(one).nbytes))
            return found


def _owner(elements: Elements) -> Elements:
    """Return the array that has the memory of a view: a whole chunk, where the view lacks what is beyond the array's edge."""
    while isinstance(elements.base, type(elements)):
        elements = elements.base
    return elements


class _ArrayChunkSource:
    """One chunk's part of the array."""

    def __init__(self, chunks: _Chunks, box: Box, itemsize: int) -> None:
        self._chunks, self._box, self.length = chunks, box, box.elements * itemsize

    def view(self) -> memoryview | None:
        """None: it is read when it is wanted."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read and unpack it."""
        import numpy as np

        held = self._chunks.get(self._box)
        if held.nbytes != self.length:
            raise CorruptCheckpoint("a chunk of another length than it should be")
        first, count = start // held.itemsize, len(into) // held.itemsize
        flat = held.reshape(-1) if held.flags.c_contiguous else held.flat
        np.frombuffer(into, held.dtype)[:] = flat[first : first + count]
