"""Open a pack for reading, however its chunks are stored: as one plain file, coded, or with earlier checkpoints.

Readers of a pack see its decoded bytes, and check them against the hashes of its chunks. Coded bytes have a hash of their own, which is
checked before decoding: so an error names the damaged file, and a decoder only sees bytes that Relight wrote.
"""

from __future__ import annotations

import contextlib
import threading
from bisect import bisect_right
from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING

from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError
from relight.format import Digest
from relight.format.chunk_codecs import DecodeContext
from relight.format.chunk_locations import OWN, ChunkLocation
from relight.format.manifest import Pack
from relight.format.names import stored_file
from relight.store import PAGE, ByteStore, Reader, page_buffer
from relight.store.base import invalidate_cache
from relight.store.retry import report_reread

if TYPE_CHECKING:
    from relight.format.planes import Rooms


def open_pack(store: ByteStore, prefix: str, pack: Pack) -> Reader:
    """Open a pack of the checkpoint in ``prefix``. The caller closes it.

    If a file with the pack's name exists, it is used, even if the part names other places for the chunks: in memory, in another tier or
    after a repair, the pack is one plain file. Raise ``CheckpointNotFound`` if the pack's file is missing, ``CorruptCheckpoint`` if a file
    with chunks stored elsewhere is missing.
    """
    if pack.stored is None:
        return store.open(f"{prefix}/{pack.file}")
    with contextlib.suppress(CheckpointNotFound):
        reader = store.open(f"{prefix}/{pack.file}")
        if reader.size == pack.size:
            return reader
        reader.close()  # an interrupted repair
    return StoredReader(store, prefix, pack)


def location_text(reader: Reader, offset: int) -> str:
    """Return a suffix for error messages: where the byte at ``offset`` of a pack is stored. Empty if it is in the pack's own file."""
    return f"; it is stored at {reader.place_of(offset)}" if isinstance(reader, StoredReader) else ""


def files_of(prefix: str, pack: Pack) -> list[str]:
    """Return the keys of the files that hold the pack's chunks, this checkpoint's own first."""
    if pack.stored is None:
        return [f"{prefix}/{pack.file}"]
    above = prefix.rpartition("/")[0]
    own_keys = [f"{prefix}/{stored_file(pack.file)}"] if pack.stored.size else []
    return own_keys + [
        f"{directory}/{file}" if "/" in directory else f"{above}/{directory}/{file}"
        for directory, file in pack.stored.homes
    ]


class _DecodingBuffers(threading.local):
    """The calling thread's buffers: for a chunk's stored bytes, and for decoding."""

    stored = memoryview(b"")
    planes: Rooms | None = None


class StoredReader:
    """Reads a pack that is not one plain file, and decodes its chunks. Thread-safe.

    Memory: for each reading thread, a buffer for a chunk's stored bytes, and what decoding takes.
    """

    def __init__(self, store: ByteStore, prefix: str, pack: Pack) -> None:
        assert pack.stored is not None
        self.size = pack.size
        self._store = store
        self._where = f"{prefix}/{pack.file}"
        self._pieces: Sequence[ChunkLocation] = pack.stored.pieces
        self._ends = list(accumulate(length for length, _ in pack.chunks))
        self._keys = files_of(prefix, pack)
        if not pack.stored.size:
            self._keys = ["", *self._keys]
        self._readers: list[Reader | None] = []
        self._buffers = _DecodingBuffers()
        try:
            for key in self._keys:
                self._readers.append(store.open(key) if key else None)
            ends = [pack.stored.size, *[0] * len(pack.stored.homes)]
            for piece in self._pieces:
                for link in piece.links():
                    ends[link.home] = max(ends[link.home], link.offset + link.length)
            for number, (key, reader, end) in enumerate(zip(self._keys, self._readers, ends, strict=True)):
                if reader is not None and (reader.size < end or (number == OWN and reader.size != end)):
                    raise CorruptCheckpoint(
                        f"{key} is {reader.size} bytes long, {end} were committed", where=self._where
                    )
        except CheckpointNotFound:
            self.close()
            missing = self._keys[len(self._readers)]
            raise CorruptCheckpoint(
                f"{missing}, which holds chunks of this pack, is missing", where=self._where
            ) from None
        except BaseException:
            self.close()
            raise

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """See ``Reader``. Works for uncoded chunks that are adjacent in one file."""
        number = bisect_right(self._ends, offset)
        first = self._pieces[number] if number < len(self._pieces) else None
        if first is None or offset != (self._ends[number - 1] if number else 0):
            return None
        end = first.offset
        while end - first.offset < length:
            piece = self._pieces[number]
            if piece.coded or (piece.home, piece.offset) != (first.home, end):
                return None
            end, number = end + piece.length, number + 1
        return self._reader(first).fetch(first.offset, length, room) if end - first.offset == length else None

    def read_into(self, offset: int, into: memoryview) -> None:
        """See ``Reader``. Request whole chunks: for part of a chunk the whole chunk is read and decoded."""
        if not 0 <= offset <= offset + len(into) <= self.size:
            raise CorruptCheckpoint("the pack is truncated", where=self._where)
        number = bisect_right(self._ends, offset)
        while len(into):
            start = self._ends[number - 1] if number else 0
            length = self._ends[number] - start
            take = min(len(into), self._ends[number] - offset)
            if take == length:
                self._chunk(self._pieces[number], into[:take])
            else:
                chunk = memoryview(bytearray(length))
                self._chunk(self._pieces[number], chunk)
                into[:take] = chunk[offset - start :][:take]
            offset, into, number = offset + take, into[take:], number + 1

    def stored(self, number: int) -> memoryview:
        """Return the stored bytes of a chunk, verified. Valid until this thread reads again."""
        return self._sound(self._pieces[number])

    def close(self) -> None:
        """Close all files."""
        for reader in self._readers:
            if reader is not None:
                reader.close()

    def _chunk(self, piece: ChunkLocation, into: memoryview) -> None:
        """Decode a chunk from the base of its delta chain: each difference is added to ``into``. The caller verifies an uncoded chunk."""
        for link in reversed(list(piece.links())):
            if link is piece and not link.coded:
                self._reader(link).read_into(link.offset, into)
                return
            stored = self._sound(link)
            gather = partial(self._gather, decoded={})
            link.codec.decode(stored, into, DecodeContext(link.base is not None, gather, self._planes))

    def _planes(self) -> Rooms:
        """Return this thread's buffers for byte planes."""
        from relight.format.planes import Rooms  # importing numpy takes 0.1 s, and most packs are plain files

        planes = self._buffers.planes = self._buffers.planes or Rooms()
        return planes

    def _gather(self, offset: int, into: memoryview, decoded: dict[int, memoryview]) -> None:
        """Read a range of this pack, for a chunk that is computed from others.

        ``decoded``: the chunk that was decoded last, as the next range may begin in it.
        """
        if offset + len(into) > self.size:
            raise CorruptCheckpoint("a chunk is derived from bytes beyond the pack's end", where=self._where)
        number = bisect_right(self._ends, offset)
        while into:
            start = self._ends[number - 1] if number else 0
            if number not in decoded:
                if not self._pieces[number].codec.portable:
                    raise CorruptCheckpoint("a chunk is derived from a derived chunk", where=self._where)
                decoded.clear()
                decoded[number] = memoryview(bytearray(self._ends[number] - start))
                self._chunk(self._pieces[number], decoded[number])
            step = min(len(into), self._ends[number] - offset)
            into[:step] = decoded[number][offset - start :][:step]
            offset, into, number = offset + step, into[step:], number + 1

    def place_of(self, offset: int) -> str:
        """Return where the chunk with the byte at ``offset`` of the pack is stored: byte range and key."""
        piece = self._pieces[min(bisect_right(self._ends, offset), len(self._pieces) - 1)]
        return f"bytes {piece.offset}–{piece.offset + piece.length} of {self._keys[piece.home]}"

    def _sound(self, piece: ChunkLocation) -> memoryview:
        """Return the stored bytes, verified. If they are not what was committed, read once more: they may have been damaged in transit."""
        data, key = self._stored(piece), self._keys[piece.home]
        if Digest(data).digest() == piece.hash:
            return data
        with contextlib.suppress(RelightError):
            invalidate_cache(self._store, key, piece.offset, piece.length)
            second_read = memoryview(bytearray(piece.length))
            reader = self._store.open(key)
            try:
                reader.read_into(piece.offset, second_read)
            finally:
                reader.close()
            if Digest(second_read).digest() == piece.hash:
                report_reread(key)
                return second_read
        raise CorruptCheckpoint(
            f"bytes {piece.offset}–{piece.offset + piece.length} of {key} are not what was committed", where=self._where
        )

    def _stored(self, piece: ChunkLocation) -> memoryview:
        buffer = self._buffers.stored
        if len(buffer) < piece.length + 2 * PAGE:
            buffer = self._buffers.stored = page_buffer(-(-piece.length // PAGE) * PAGE + 2 * PAGE)
        reader = self._reader(piece)
        data = reader.fetch(piece.offset, piece.length, buffer)
        if data is None:
            data = buffer[: piece.length]
            reader.read_into(piece.offset, data)
        return data

    def _reader(self, piece: ChunkLocation) -> Reader:
        reader = self._readers[piece.home]
        assert reader is not None
        return reader
