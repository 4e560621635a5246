"""A store in the process's memory: for tests and notebooks, and the smallest example of the interface."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from relight.errors import CheckpointNotFound, CorruptCheckpoint, StoreUnavailable, UnsafeContent
from relight.store.base import Entry, Properties, Reader, StoreBase, Writer, check_key

_shared: dict[str, MemoryStore] = {}
"""Stores by name: ``memory://name`` is the same store everywhere in the process."""
_shared_lock = threading.Lock()


class MemoryStore(StoreBase):
    """Files in a dict. ``MemoryStore.named(name)`` returns the store of ``memory://name``."""

    def __init__(self, name: str = "") -> None:
        self.url = f"memory://{name}"
        self._files: dict[str, bytes | bytearray] = {}
        self._lock = threading.Lock()

    @classmethod
    def named(cls, name: str) -> MemoryStore:
        """Return the store of that name. There is one per name and process."""
        with _shared_lock:
            return _shared.setdefault(name, cls(name))

    def properties(self) -> Properties:
        """Exclusive within the process; not durable."""
        return Properties(exclusive_create=True)

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        with self._lock:
            if check_key(key, file=True) in self._files:
                return False
            self._files[key] = bytes(data)
            return True

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        with self._lock:
            if check_key(key, file=True) in self._files:
                raise StoreUnavailable("a file of this name exists already", where=key, retryable=False)
            buffer = bytearray(size)
            self._files[key] = buffer
        return _MemoryWriter(self, key, buffer)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        return _MemoryRewriter(self, check_key(key, file=True), bytearray(size))

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        data = self._file(key)
        if len(data) > limit:
            raise UnsafeContent(f"{len(data)} bytes where at most {limit} are allowed", where=key)
        return bytes(data)

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        return _MemoryReader(self._file(key), key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        start = f"{check_key(prefix)}/" if prefix else ""
        with self._lock:
            below = [key[len(start) :] for key in self._files if key.startswith(start)]
        return iter({Entry(key.split("/", 1)[0], "/" in key) for key in below})

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        with self._lock:
            self._files.pop(check_key(key), None)

    def _file(self, key: str) -> bytes | bytearray:
        with self._lock:
            try:
                return self._files[check_key(key)]
            except KeyError:
                raise CheckpointNotFound("no such file", where=key) from None


class _MemoryWriter:
    align = 1

    def __init__(self, store: MemoryStore, key: str, buffer: bytearray) -> None:
        self._store, self._key, self._buffer = store, key, buffer

    def write_at(self, offset: int, data: memoryview) -> None:
        self._buffer[offset : offset + len(data)] = data

    def finish(self, size: int | None = None) -> None:
        if size is not None:
            del self._buffer[size:]

    def abort(self) -> None:
        with self._store._lock:
            if self._store._files.get(self._key) is self._buffer:  # not another file of that name
                del self._store._files[self._key]


class _MemoryRewriter(_MemoryWriter):
    def finish(self, size: int | None = None) -> None:
        super().finish(size)
        with self._store._lock:
            self._store._files[self._key] = self._buffer

    def abort(self) -> None:
        pass


class _MemoryReader:
    def __init__(self, data: bytes | bytearray, key: str) -> None:
        self._data, self._key, self.size = data, key, len(data)

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        if offset + len(into) > self.size:
            raise CorruptCheckpoint(f"the file ends at byte {self.size}, and is truncated", where=self._key)
        into[:] = memoryview(self._data)[offset : offset + len(into)]

    def close(self) -> None:
        pass
