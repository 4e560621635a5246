"""A store that counts what is read from it: what the many-ranks promises are measured by."""

from __future__ import annotations

import threading
from typing import Any

from relight.store import ByteStore, Reader


class CountingStore:
    """``store``, with the bytes read from its packs counted."""

    def __init__(self, store: ByteStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self.pack_bytes = 0
        """Read from packs so far, through this object."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)

    def open(self, key: str) -> Reader:
        """A reader that counts, of a pack."""
        reader = self._store.open(key)
        return _Counting(self, reader) if key.endswith(".safetensors") else reader

    def add(self, length: int) -> None:
        """So many more."""
        with self._lock:
            self.pack_bytes += length


class _Counting:
    def __init__(self, store: CountingStore, reader: Reader) -> None:
        self._store, self._reader, self.size = store, reader, reader.size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        found = self._reader.fetch(offset, length, room)
        if found is not None:
            self._store.add(length)
        return found

    def read_into(self, offset: int, into: memoryview) -> None:
        self._reader.read_into(offset, into)
        self._store.add(len(into))

    def close(self) -> None:
        self._reader.close()
