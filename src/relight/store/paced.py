"""A store wrapper with bandwidth limits that all processes of the node share."""

from __future__ import annotations

from typing import Protocol

from relight.comm.node_pace import NodePace
from relight.store.base import PAGE, ByteStore, Reader, Writer, rewrites
from relight.store.wrapper import StoreWrapper

SMALL_BYTES = 64 << 10
"""Largest file that is not limited when written or read at once: log records, roots."""


class Bound(Protocol):
    """A bandwidth limit: see ``NodePace``."""

    @property
    def piece_bytes(self) -> int:
        """Bytes to move at once."""

    def spend(self, length: int) -> None:
        """Wait until ``length`` more bytes may be moved."""

    def spent(self, length: int) -> None:
        """Wait for the time that ``length`` bytes take at the limit, after they were moved at once."""


class PacedStore(StoreWrapper):
    """``inner``, with a limit on writing and one on reading; None: no limit."""

    def __init__(self, inner: ByteStore, writing: Bound | None, reading: Bound | None) -> None:
        super().__init__(inner)
        self.writing, self.reading = writing, reading

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
        for start in range(0, len(data), self._piece):
            piece = data[start : start + self._piece]
            self._bound.spend(len(piece))
            self._inner.write_at(offset + start, piece)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)

    def abort(self) -> None:
        self._inner.abort()


class _PacedReader:
    def __init__(self, inner: Reader, bound: Bound) -> None:
        self._inner, self._bound, self.size = inner, bound, inner.size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        data = self._inner.fetch(offset, length, room)
        if data is not None:  # None: the caller uses ``read_into``
            self._bound.spent(length)
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        piece = self._bound.piece_bytes
        for start in range(0, len(into), piece):
            self._bound.spend(len(into[start : start + piece]))
            self._inner.read_into(offset + start, into[start : start + piece])

    def close(self) -> None:
        self._inner.close()


def paced(
    store: ByteStore, purpose: str, write_bytes_per_second: float | None, read_bytes_per_second: float | None
) -> ByteStore:
    """Return ``store`` with the bandwidth limits of a run; unchanged if there are none.

    ``purpose`` names run and nearest store. Stores with the same purpose share each limit.
    """
    if write_bytes_per_second is None and read_bytes_per_second is None:
        return store
    writing = None if write_bytes_per_second is None else NodePace(write_bytes_per_second, f"write {purpose}")
    reading = None if read_bytes_per_second is None else NodePace(read_bytes_per_second, f"read {purpose}")
    return PacedStore(store, writing, reading)
