"""A store that counts calls and bytes of the process that uses it, and reports when a name was created."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator

from relight.format.names import is_pack_file
from relight.store import ByteStore
from relight.store.base import Entry, Reader, Writer
from relight.store.wrapper import StoreWrapper


def but_packs(name: str) -> bool:
    """Return whether a file is not a pack. As ``apart`` it restricts the count of bytes to packs."""
    return not is_pack_file(name)


class CountingStore(StoreWrapper):
    """Count the calls and bytes of ``inner``. ``apart``: predicate on file names; bytes of these files are not counted.

    ``asked`` counts calls. ``bytes`` counts bytes as *listed* (of names), *read* and *written*. ``on_create`` is called
    after each call that creates a name, with the key and ``time.perf_counter()``.
    """

    def __init__(
        self,
        inner: ByteStore,
        *,
        apart: Callable[[str], bool] = lambda name: False,
        on_create: Callable[[str, float], None] | None = None,
    ) -> None:
        super().__init__(inner)
        self.asked: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()
        self._apart, self._on_create = apart, on_create
        self._lock = threading.Lock()

    @property
    def through(self) -> int:
        """Return the number of all bytes."""
        return self.bytes.total()

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        self.count("put_once", key, "written", len(data))
        created = self.inner.put_once(key, data)
        self.on_created(key)
        return created

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``."""
        self.count("write", key, "written", size)
        return _CountingWriter(self, self.inner.write(key, size), key)

    def sync(self, prefix: str) -> None:
        """See ``ByteStore``."""
        self.asked["sync"] += 1
        self.inner.sync(prefix)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        data = self.inner.get(key, limit)
        self.count("get", key, "read", len(data))
        return data

    def open(self, key: str) -> Reader:
        """See ``ByteStore``."""
        self.asked["open"] += 1
        return _CountingReader(self, self.inner.open(key), key)

    def list(self, prefix: str) -> Iterator[Entry]:
        """See ``ByteStore``."""
        entries = list(self.inner.list(prefix))
        self.count("list", "", "listed", sum(len(entry.name) for entry in entries))
        return iter(entries)

    def delete(self, key: str) -> None:
        """See ``ByteStore``."""
        self.asked["delete"] += 1
        self.inner.delete(key)

    def delete_dir(self, prefix: str) -> bool:
        """See ``ByteStore``."""
        self.asked["delete_dir"] += 1
        return self.inner.delete_dir(prefix)

    def count(self, call: str, key: str, how: str, length: int) -> None:
        """Count one call, unless ``call`` is empty, and the bytes that it moved."""
        with self._lock:
            if call:
                self.asked[call] += 1
            if not self._apart(key.rpartition("/")[2]):
                self.bytes[how] += length

    def on_created(self, key: str) -> None:
        """Report that a name was created."""
        if self._on_create is not None:
            self._on_create(key, time.perf_counter())


class _CountingWriter:
    def __init__(self, store: CountingStore, inner: Writer, key: str) -> None:
        self._store, self._inner, self._key, self.align = store, inner, key, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        self._inner.finish(size)
        self._store.on_created(self._key)

    def abort(self) -> None:
        self._inner.abort()


class _CountingReader:
    def __init__(self, store: CountingStore, inner: Reader, key: str) -> None:
        self._store, self._inner, self._key, self.size = store, inner, key, inner.size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        data = self._inner.fetch(offset, length, room)
        if data is not None:
            self._store.count("", self._key, "read", length)
        return data

    def read_into(self, offset: int, into: memoryview) -> None:
        self._inner.read_into(offset, into)
        self._store.count("", self._key, "read", len(into))

    def close(self) -> None:
        self._inner.close()
