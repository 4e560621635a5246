"""A remote store with a cache of its files' blocks on a local disk.

Only immutable files are cached: packs, parts and roots of checkpoints. The log, listings and messages between ranks are always read from
the remote store, so the cache never decides which checkpoints exist. Readers verify every byte by its hash. To bypass the cache for
doubtful data, use ``without_cache`` or ``invalidate_cache``, or read a range twice through one reader.
"""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Iterator
from dataclasses import astuple, dataclass

from relight.errors import CheckpointNotFound, CorruptCheckpoint
from relight.format.names import DRAFT_FILE, is_written_file, parse_dir
from relight.observe import emit
from relight.store.base import ByteStore, Reader, Writer, check_key, rewrites
from relight.store.blocks import BLOCK_BYTES, BlockCache, name_of
from relight.store.buffers import page_buffer
from relight.store.wrapper import StoreWrapper


def is_fixed(key: str) -> bool:
    """Return whether the file at ``key`` is immutable: a pack, a part or the root in a checkpoint's directory."""
    above, _, name = key.rpartition("/")
    return is_written_file(name) and name != DRAFT_FILE and parse_dir(above.rpartition("/")[2]) is not None


@dataclass(slots=True)
class Counts:
    """Read statistics. A hit is a read within one cached block. A miss reads the block, or the wanted part, from the remote store."""

    hits: int = 0
    misses: int = 0
    hit_bytes: int = 0
    missed_bytes: int = 0


class CachedStore(StoreWrapper):
    """``inner``, with its immutable files cached in ``blocks``. Thread-safe.

    Memory: one block per thread that reads less than a block. ``counts``: statistics of this store object.
    """

    def __init__(self, inner: ByteStore, blocks: BlockCache) -> None:
        super().__init__(inner)
        self.blocks = blocks
        self.counts = Counts()
        self.changes = 0
        """Changes to immutable files through this store. Readers opened before the last change cache nothing: their file may be gone."""
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"CachedStore({self.inner!r}, {self.blocks!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (CachedStore, (self.inner, self.blocks))

    def without_cache(self) -> ByteStore:
        """See ``CachesBlocks``."""
        return self.inner

    def put_once(self, key: str, data: bytes) -> bool:
        """See ``ByteStore``."""
        self._changed(key)
        return self.inner.put_once(key, data)

    def write(self, key: str, size: int) -> Writer:
        """See ``ByteStore``. Written files are not cached: they are mostly restored on other machines."""
        self._changed(key)
        return self.inner.write(key, size)

    def rewrite(self, key: str, size: int) -> Writer:
        """See ``Rewrites``."""
        self._changed(key)
        return rewrites(self.inner).rewrite(key, size)

    def get(self, key: str, limit: int) -> bytes:
        """See ``ByteStore``."""
        if not is_fixed(check_key(key)):
            return self.inner.get(key, limit)
        name = name_of(self.url, key)
        while (content := self._cached_file(key, name, limit)) is None:
            with self.blocks.fetching(name, 0) as is_mine:
                if is_mine:  # another process may just have fetched it
                    cached = self._cached_file(key, name, limit)
                    return cached if cached is not None else self._fetch_file(key, name, limit)
        return content

    def _cached_file(self, key: str, name: str, limit: int) -> bytes | None:
        """Return a whole file from the cache; None if it is not cached, or longer than ``limit``."""
        size = self.blocks.file_bytes(name)
        if size is None or size > limit:
            return None
        data = bytearray(size)
        pieces = list(_blocks_of(memoryview(data)))
        if not all(self.blocks.take(name, number, size, [piece]) for number, piece in enumerate(pieces)):
            return None
        self.count(key, Counts(hits=len(pieces), hit_bytes=size))
        return bytes(data)

    def _fetch_file(self, key: str, name: str, limit: int) -> bytes:
        """Read a whole file from the remote store, and cache it."""
        changes = self.changes
        content = self.inner.get(key, limit)
        pieces = list(_blocks_of(memoryview(content)))
        for number, piece in enumerate(pieces):
            if changes == self.changes:
                self.blocks.keep(name, number, len(content), piece)
        self.count(key, Counts(misses=len(pieces), missed_bytes=len(content)))
        return content

    def open(self, key: str) -> Reader:
        """See ``ByteStore``. If the file's first block is cached, no request is sent until a block is missing."""
        if not is_fixed(check_key(key)):
            return self.inner.open(key)
        return _CachedReader(self, key, self.blocks.file_bytes(name_of(self.url, key)))

    def delete(self, key: str) -> None:
        """See ``ByteStore``. Cached blocks are dropped before and after the deletion, as another thread may be reading."""
        self._changed(key)
        self.inner.delete(key)
        self._changed(key)

    def invalidate(self, key: str, offset: int = 0, length: int | None = None) -> None:
        """Drop the cached blocks of a range of a file, or of all of it."""
        if is_fixed(key):
            end = None if length is None else offset + length
            self.blocks.drop(
                name_of(self.url, key), None if end is None else range(offset // BLOCK_BYTES, -(-end // BLOCK_BYTES))
            )

    def _changed(self, key: str) -> None:
        if is_fixed(key):
            with self._lock:
                self.changes += 1
            self.invalidate(key)

    def count(self, key: str, counts: Counts) -> None:
        """Add to the statistics, and emit ``cache.read``."""
        with self._lock:
            self.counts = Counts(
                *(total + more for total, more in zip(astuple(self.counts), astuple(counts), strict=True))
            )
        if counts.hits or counts.misses:
            emit(
                "cache.read",
                key=key,
                hits=counts.hits,
                misses=counts.misses,
                hit_bytes=counts.hit_bytes,
                missed_bytes=counts.missed_bytes,
            )


class _CachedReader:
    """``size``: the file's length if known from the cache; None opens the remote file."""

    def __init__(self, store: CachedStore, key: str, size: int | None) -> None:
        self._store, self._blocks, self._key = store, store.blocks, key
        self._name, self._changes = name_of(store.url, key), store.changes
        self._lock = threading.Lock()
        self._counts = Counts()
        self._inner: Reader | None = None
        self._sound: dict[int, int] = {}
        """Inodes of blocks that this reader has verified. Later reads of them skip hashing."""
        self._served: set[tuple[int, int]] = set()
        self._rooms: deque[memoryview] = deque()
        if size is None:
            self._inner = store.inner.open(key)
            size = self._inner.size
        self.size = size

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        return None

    def read_into(self, offset: int, into: memoryview) -> None:
        into = into.cast("B")
        if offset + len(into) > self.size:
            raise CorruptCheckpoint(f"the file ends at byte {self.size}, and is truncated", where=self._key)
        with self._lock:
            doubted = (offset, len(into)) in self._served
            self._served.add((offset, len(into)))
        while into:
            number, within = divmod(offset, BLOCK_BYTES)
            step = min(BLOCK_BYTES - within, len(into))
            self._read(number, within, into[:step], doubted)
            into, offset = into[step:], offset + step

    def close(self) -> None:
        with self._lock:
            inner, self._inner = self._inner, None
            counts, self._counts = self._counts, Counts()
        if inner is not None:
            inner.close()
        self._store.count(self._key, counts)

    def _read(self, number: int, within: int, into: memoryview, doubted: bool) -> None:
        """Fill ``into`` from a block. ``doubted``: the range was read before and was bad, so read it from the remote store."""
        if doubted:
            self._bring(number, within, into)
            return
        while not self._take(number, within, into):
            if not self._blocks.takes_more:  # nothing can be cached: read only the wanted part
                self._far().read_into(number * BLOCK_BYTES + within, into)
                self._count(Counts(misses=1, missed_bytes=len(into)))
                return
            with self._blocks.fetching(self._name, number) as is_mine:
                if is_mine and not self._take(number, within, into):  # the thread before may just have fetched it
                    self._bring(number, within, into)
                if is_mine:
                    return

    def _take(self, number: int, within: int, into: memoryview) -> bool:
        inode = self._sound.get(number)
        if inode is None or not self._blocks.take_part(self._name, number, inode, within, into):
            with self._room(self._length(number) - len(into)) as room:
                pieces = [piece for piece in (room[:within], into, room[within:]) if piece]
                inode = self._blocks.take(self._name, number, self.size, pieces)
            if inode is None:
                return False
            self._sound[number] = inode
        self._count(Counts(hits=1, hit_bytes=len(into)))
        return True

    def _bring(self, number: int, within: int, into: memoryview) -> None:
        """Read the whole block from the remote store; directly into ``into`` if that is the whole block."""
        length = self._length(number)
        if len(into) == length:
            self._bring_to(number, into)
            return
        with self._room(length) as room:
            self._bring_to(number, room)
            into[:] = room[within : within + len(into)]

    def _bring_to(self, number: int, room: memoryview) -> None:
        self._far().read_into(number * BLOCK_BYTES, room)
        kept = self._blocks.keep(self._name, number, self.size, room) if self._changes == self._store.changes else None
        if kept is None:
            self._sound.pop(number, None)
        else:
            self._sound[number] = kept
        self._count(Counts(misses=1, missed_bytes=len(room)))

    def _far(self) -> Reader:
        """Return the remote file. Raise ``CorruptCheckpoint`` if it is gone, or differs in size from the cached blocks' file."""
        with self._lock:
            if self._inner is None:
                try:
                    self._inner = self._store.inner.open(self._key)
                except CheckpointNotFound as error:
                    raise CorruptCheckpoint("it is gone, and only some of it is cached", where=self._key) from error
            inner = self._inner
        if inner.size != self.size:
            self._store.invalidate(self._key)
            raise CorruptCheckpoint(f"{inner.size} bytes long, and {self.size} when it was cached", where=self._key)
        return inner

    def _length(self, number: int) -> int:
        return min(BLOCK_BYTES, self.size - number * BLOCK_BYTES)

    @contextlib.contextmanager
    def _room(self, length: int) -> Iterator[memoryview]:
        """Yield memory for the unwanted rest of a block."""
        try:
            whole = self._rooms.pop()
        except IndexError:
            whole = page_buffer(BLOCK_BYTES) if length else memoryview(b"")
        yield whole[:length]
        if whole:
            self._rooms.append(whole)

    def _count(self, more: Counts) -> None:
        with self._lock:
            self._counts = Counts(
                *(total + added for total, added in zip(astuple(self._counts), astuple(more), strict=True))
            )


def _blocks_of(data: memoryview) -> Iterator[memoryview]:
    """Yield ``data`` in blocks; one empty block for empty data, so that its length is cached too."""
    for start in range(0, max(len(data), 1), BLOCK_BYTES):
        yield data[start : start + BLOCK_BYTES]
