"""Arrays in chunks of one shape, each encoded separately: the common part of zarr 2 and 3."""

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
from relight.importers.tensors import AssembledTensor, Tiled
from relight.importers.value_cache import ValueCache
from relight.layout import Box
from relight.units import size_text

CHUNK_BYTES_MAX = 1 << 30
CHUNKS_MAX = 1_000_000
CODED_MORE = 1 << 16
"""Bytes by which an encoded chunk may exceed its decoded length."""
WINDOW_LOG_MAX = 25
"""Largest window of a zstd frame, as a power of two: 32 MiB. Only levels 21 and 22 use more."""
if TYPE_CHECKING:
    import numpy as np

    Elements = np.ndarray[Any, np.dtype[np.void]]
Reader = Callable[[Box], "Elements"]


def chunked_array(
    dtype: str, shape: tuple[int, ...], chunks: tuple[int, ...], read: Reader, where: str, cache: ValueCache
) -> AssembledTensor:
    """Return an array of chunks. ``read`` returns the elements of one chunk: at the array's edges only those inside it."""
    size = DTYPES[dtype].itemsize
    boxes = boxes_of(shape, chunks, dtype, where)
    reads = _Chunks(read, cache, where)
    return AssembledTensor(
        dtype,
        shape,
        Tiled(dtype, shape, [(box, _ArrayChunkSource(reads, box, size)) for box in boxes], where),
        ("array", where),
    )


def boxes_of(shape: tuple[int, ...], chunks: tuple[int, ...], dtype: str, where: str) -> list[Box]:
    """Return the chunks' boxes, clipped at the edges. Raise ``UnsafeContent`` for too many, or too large ones."""
    if any(extent < 1 for extent in chunks) or math.prod(chunks) * DTYPES[dtype].itemsize > CHUNK_BYTES_MAX:
        raise UnsafeContent("chunks of zero bytes, or of more than a gigabyte", where=where)
    counts = [-(-extent // step) for extent, step in zip(shape, chunks, strict=True)]
    if math.prod(counts) > CHUNKS_MAX:
        raise UnsafeContent(f"{math.prod(counts)} chunks", where=where)
    boxes = []
    for numbers in product(*map(range, counts)):
        start = tuple(number * step for number, step in zip(numbers, chunks, strict=True))
        boxes.append(
            Box(
                start,
                tuple(min(step, extent - begin) for step, extent, begin in zip(chunks, shape, start, strict=True)),
            )
        )
    return boxes


def numbers_of(value: Any, where: str) -> tuple[int, ...]:
    """Return a shape, checked."""
    if (
        not isinstance(value, list)
        or len(value) > 64
        or any(type(extent) is not int or not 0 <= extent < 2**62 for extent in value)
    ):
        raise UnsafeContent("an impossible shape", where=where)
    return tuple(value)


def elements_of(
    pieces: Iterator[bytes], zstd: bool, chunks: tuple[int, ...], box: Box, dtype: str, where: str
) -> Elements:
    """Return a chunk's elements that are inside the array, of shape ``box.size``.

    ``pieces``: the chunk's bytes in the file, in order. Raise ``CorruptCheckpoint`` if their number is wrong.

    A chunk larger than a slab is decoded into an unlinked temporary file and mapped. So memory stays within a piece and
    zstd's window of at most ``2**WINDOW_LOG_MAX`` bytes. Raise ``NoSpace`` if there is no space for the file.
    """
    import numpy as np

    size, written = math.prod(chunks) * DTYPES[dtype].itemsize, 0
    decoded = _decoded(pieces, where) if zstd else pieces
    try:
        with tempfile.TemporaryFile(prefix="relight-") if size > SLAB_BYTES else io.BytesIO() as file:
            for piece in decoded:
                written += len(piece)
                if written > size:
                    break
                file.write(piece)
            if written != size:
                length = f"more than {size}" if written > size else f"{written}"
                raise CorruptCheckpoint(f"a chunk of {length} bytes instead of {size}", where=where)
            file.flush()
            data = (
                file.getvalue() if isinstance(file, io.BytesIO) else mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ)
            )
    except OSError as error:
        hint = f"make room in {tempfile.gettempdir()}, or name another directory: TMPDIR"
        raise NoSpace(
            f"a chunk of {size_text(size)} cannot be decoded here: {error.strerror}", where=where, hint=hint
        ) from error
    whole_chunk = np.frombuffer(data, f"V{DTYPES[dtype].itemsize}").reshape(chunks)
    inside: tuple[Any, ...] = (..., *(slice(extent) for extent in box.size))
    clipped: Elements = whole_chunk[inside]
    return clipped


def _decoded(pieces: Iterator[bytes], where: str) -> Iterator[bytes]:
    """Yield one zstd frame's content, piece by piece."""
    if sys.version_info >= (3, 14):
        from compression import zstd
    else:
        from backports import zstd

    decompressor = zstd.ZstdDecompressor(options={zstd.DecompressionParameter.window_log_max: WINDOW_LOG_MAX})
    try:
        for piece in pieces:
            data = piece
            while not decompressor.eof:
                content = decompressor.decompress(data, max_length=PIECE_BYTES)
                if content:
                    yield content
                data = b""
                if decompressor.needs_input:
                    break
    except (zstd.ZstdError, EOFError, ValueError) as error:
        raise CorruptCheckpoint(f"a chunk that cannot be unpacked: {str(error)[:80]}", where=where) from None


class _Chunks:
    """The chunks of one array. A chunk is decoded once for consecutive slabs, and never by two threads at once."""

    def __init__(self, read: Reader, cache: ValueCache, where: str) -> None:
        self._read, self._cache, self._where = read, cache, where
        self._lock = threading.Lock()

    def get(self, box: Box) -> Elements:
        """Return a chunk's elements."""
        with self._lock:
            elements: Elements = self._cache.get(
                (self._where, box), lambda: self._read(box), lambda chunk: int(_owner(chunk).nbytes)
            )
            return elements


def _owner(elements: Elements) -> Elements:
    """Return the array that owns a view's memory: the whole chunk, if the view lacks the part beyond the array's edge."""
    while isinstance(elements.base, type(elements)):
        elements = elements.base
    return elements


class _ArrayChunkSource:
    """The part of the array in one chunk."""

    def __init__(self, chunks: _Chunks, box: Box, itemsize: int) -> None:
        self._chunks, self._box, self.length = chunks, box, box.elements * itemsize

    def view(self) -> memoryview | None:
        """Return None: the chunk is read on demand."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Read and decode the chunk."""
        import numpy as np

        elements = self._chunks.get(self._box)
        if elements.nbytes != self.length:
            raise CorruptCheckpoint("a chunk of the wrong length")
        first, count = start // elements.itemsize, len(into) // elements.itemsize
        flat = elements.reshape(-1) if elements.flags.c_contiguous else elements.flat
        np.frombuffer(into, elements.dtype)[:] = flat[first : first + count]
