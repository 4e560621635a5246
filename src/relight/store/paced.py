"""A store that writes and reads no faster than a bound which all processes of the node keep together."""

from __future__ import annotations

from typing import Protocol

from relight.comm.node_pace import NodePace
from relight.store.base import PAGE, ByteStore, Reader, Writer
from relight.store.wrapper import StoreWrapper, rewrites

SMALL_BYTES = 64 << 10
"""What is written or read whole and is no larger is not slowed down: log records, roots, listings."""


class Bound(Protocol):
    """What keeps a bound: see ``NodePace``."""

    @property
    def piece_bytes(self) -> int:
        """Bytes to move at once."""

    def spend(self, length: int) -> None:
        """Wait until ``length`` more bytes may be moved."""

    def spent(self, length: int) -> None:
        """Wait until the time of ``length`` bytes is over, which were moved at once just now."""


class PacedStore(StoreWrapper):
    """``inner``, with a bound on what is written, and one on what is read; None for no bound."""

    def __init__(self, inner: ByteStore, writing: Bound | None, reading: Bound | None) -> None:
        super().__init__(inner)
        self.writing, self.reading = writing, reading

    def _over(self, below: ByteStore) -> ByteStore:
        return PacedStore(below, self.writing, self.reading)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        return self._paced(self.inner.write(key, size), size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        return self._paced(rewrites(self.inner).rewrite(key, size), size)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        data = self.inner.get(key, limit)
        if self.reading is not None and len(data) > SMALL_BYTES:
            self.reading.spent(len(data))
        return data

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        reader = self.inner.open(key)
        return reader if self.reading is None else _PacedReader(reader, self.reading)

    def _paced(self, writer: Writer, size: int) -> Writer:
        return writer if self.writing is None or size <= SMALL_BYTES else _PacedWriter(writer, self.writing)


class _PacedWriter:
    def __init__(self, inner: Writer, bound: Bound) -> None:
        self._inner, self._bound, self.align = inner, bound, inner.align
        self._piece = max(bound.piece_bytes // max(inner.align, PAGE), 1) * max(inner.align, PAGE)

    def write_at(self, offset: int, data: memoryview) -> None:
        for at in range(0, len(data), self._piece):
            piece = data[at : at + self._piece]
            self._bound.spend(len(piece))
            self._inner.write_at(offset + at, piece)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)

    def abort(self) -> None:
        self._inner.abort()


class _PacedReader:
    def __init__(self, inner: Reader, bound: Bound) -> None:
        self._inner, self._bound, self.size = inner, bound, inner.size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        found = self._inner.fetch(offset, length, room)
        if found is not None:  # else the caller reads with ``read_into``
            self._bound.spent(length)
        return found

    def read_into(self, offset: int, into: memoryview) -> None:
        piece = self._bound.piece_bytes
        for at in range(0, len(into), piece):
            self._bound.spend(len(into[at : at + piece]))
            self._inner.read_into(offset + at, into[at : at + piece])

    def close(self) -> None:
        self._inner.close()


def paced(store: ByteStore, purpose: str, write_bytes_per_second: float | None, read_bytes_per_second: float | None) -> ByteStore:
    """Return ``store`` with the bounds of a run's ``Limits``; unchanged if there are none. ``purpose`` names run
    and nearest store: stores with one purpose share each bound."""
    if write_bytes_per_second is None and read_bytes_per_second is None:
        return store
    writing = None if write_bytes_per_second is None else NodePace(write_bytes_per_second, f"write {purpose}")
    reading = None if read_bytes_per_second is None else NodePace(read_bytes_per_second, f"read {purpose}")
    return PacedStore(store, writing, reading)
