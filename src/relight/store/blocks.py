"""Block cache: blocks of remote files in a local directory, with LRU eviction.

Each block is one file: its bytes, then a trailer with its length, the length of the whole file, and digests. Any number of processes
write blocks under a temporary name and rename them, without fsync. Locks only keep two of them from fetching one block (``block_locks``).
A torn, damaged or foreign block is a cache miss, and so is a block that vanished. Disk errors are never raised. After the first write
error, one event is emitted and this process caches nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import secrets
import struct
import threading
import time
from collections.abc import Iterator, Sequence

from relight.errors import ConfigError
from relight.format import Digest, digest
from relight.observe import emit
from relight.settings.amounts import bytes_of
from relight.settings.environment import environment
from relight.store.block_locks import block_lock

BLOCK_BYTES = 4 << 20
"""Bytes per block: equal to the chunk size of large tensors and the piece size of object store reads."""
SHARE = 10
"""Divisor of the default limit: a tenth of the space that is free when a directory is first used."""
LIMIT_FILE = "limit"
"""File in the directory with the default limit in bytes, so that the limit does not shrink as the cache fills."""
_FULL, _LOW, _CHECKS = 8, 4, 64
"""Below 1/8 of free space, evict until 1/4 is free. Each process checks after it has written 1/64 of the limit."""
_STALE_S = 3600.0
"""Age in seconds after which a temporary file is orphaned."""
_TRIES = 5
_MAGIC = b"relight block 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
TRAILER_BYTES = _TRAILER.size + 32
_TMP = ".tmp-"
_HEX = frozenset("0123456789abcdef")


class BlockCache:
    """Cache of blocks in ``folder``, at most ``limit`` bytes. None: the limit in the file ``limit``, initially a tenth of the free space.

    Construction does not touch the disk. Thread-safe. Processes share the directory with one object each. Up to eight processes that
    fill it at the same time stay below the limit.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None) -> None:
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self._given_limit = limit
        self._limit = limit or 0
        self._until_check = 0
        self._lock = threading.Lock()
        self._check_lock = threading.Lock()
        self._fetching: dict[tuple[str, int], threading.Event] = {}
        self._ready = self._full = False

    def __repr__(self) -> str:
        return f"Blocks({self.folder!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (blocks_in, (self.folder, self._given_limit))

    @property
    def takes_more(self) -> bool:
        """Return whether blocks are still cached: False after a write error."""
        return not self._full

    def file_bytes(self, name: str) -> int | None:
        """Return the length of the whole file ``name`` from its first block; None if that block is not cached."""
        try:
            fd = self._open(name, 0)
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size - TRAILER_BYTES
            trailer = self._read_trailer(fd, name, 0, length)
        except OSError:
            return None
        finally:
            os.close(fd)
        return trailer[0] if trailer is not None else None

    def take(self, name: str, number: int, file_bytes: int, pieces: Sequence[memoryview]) -> int | None:
        """Read a whole block into ``pieces``, in order, and return the inode of its file.

        Return None if the block is not cached or damaged. ``pieces`` may then hold anything.
        """
        length = sum(len(piece) for piece in pieces)
        trailer = memoryview(bytearray(TRAILER_BYTES))
        try:
            fd = self._open(name, number)
        except OSError:
            return None
        try:
            status = os.fstat(fd)
            if status.st_size != length + TRAILER_BYTES:
                return None
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # read ahead all of it at once
            if os.preadv(fd, [*pieces, trailer], 0) != status.st_size:
                return None
            hasher = Digest()
            for piece in pieces:
                hasher.update(piece)
            if trailer != _trailer(name, number, file_bytes, length, hasher.digest()):
                return None
            with contextlib.suppress(OSError):  # a full or read-only disk can still be read
                os.utime(fd)  # record the use: access times are often disabled
        except OSError:
            return None
        finally:
            os.close(fd)
        return status.st_ino

    def take_part(self, name: str, number: int, inode: int, within: int, into: memoryview) -> bool:
        """Fill ``into`` from byte ``within`` of a block that ``take`` has verified. Return False if its file is gone or was replaced."""
        try:
            fd = self._open(name, number)
        except OSError:
            return False
        try:
            return os.fstat(fd).st_ino == inode and os.preadv(fd, [into], within) == len(into)
        except OSError:
            return False
        finally:
            os.close(fd)

    def keep(self, name: str, number: int, file_bytes: int, data: memoryview) -> int | None:
        """Write a block, replacing an existing one. Return its inode; None if caching is off or the write failed."""
        if self._full:
            return None
        trailer = _trailer(name, number, file_bytes, len(data), digest(data))
        try:
            self._prepare()
            inode = self._write(self._path(name, number), data, trailer)
        except OSError as error:
            self._refused(error)
            return None
        self._count(len(data) + TRAILER_BYTES)
        return inode

    def drop(self, name: str, numbers: range | None = None) -> None:
        """Delete blocks ``numbers`` of a file; all of its blocks if None."""
        folder = self._folder(name)
        if numbers is None:
            with contextlib.suppress(OSError):
                for entry in list(os.scandir(folder)):
                    _unlink(entry.path)
        for number in numbers or ():
            _unlink(os.path.join(folder, str(number)))
        with contextlib.suppress(OSError):
            os.rmdir(folder)

    @contextlib.contextmanager
    def fetching(self, name: str, number: int) -> Iterator[bool]:
        """Yield True to the thread that must fetch the block. Other threads wait until it has finished, and get False.

        If another process is fetching the block, the thread has waited for it: the block may be in the cache by then.
        """
        key = (name, number)
        with self._lock:
            other = self._fetching.get(key)
            if other is None:
                self._fetching[key] = threading.Event()
        if other is not None:
            other.wait()
            yield False
            return
        try:
            with self._block_lock(f"{name}/{number}"):
                yield True
        finally:
            with self._lock:
                self._fetching.pop(key).set()

    def _block_lock(self, block: str) -> contextlib.AbstractContextManager[None]:
        try:
            self._prepare()
        except OSError:  # `keep` reports a disk that refuses
            return contextlib.nullcontext()
        return block_lock(self.folder, block) if self.takes_more else contextlib.nullcontext()

    def total_bytes(self) -> int:
        """Return the bytes that all processes have cached. Cost: one stat per block."""
        return sum(size for _, size, _ in _found(self.folder))

    # -- inside

    def _folder(self, name: str) -> str:
        return os.path.join(self.folder, name[:2], name)

    def _path(self, name: str, number: int) -> str:
        return os.path.join(self._folder(name), str(number))

    def _open(self, name: str, number: int) -> int:
        return os.open(self._path(name, number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _read_trailer(self, fd: int, name: str, number: int, length: int) -> tuple[int, bytes] | None:
        """Return the file's length and the block's digest; None if the trailer is invalid."""
        if length < 0:
            return None
        data = os.pread(fd, TRAILER_BYTES, length)
        if len(data) != TRAILER_BYTES:  # truncated meanwhile
            return None
        _, file_bytes, _, hashed = _TRAILER.unpack_from(data)
        return (file_bytes, hashed) if data == _trailer(name, number, file_bytes, length, hashed) else None

    def _write(self, path: str, data: memoryview, trailer: bytes) -> int:
        temporary = os.path.join(os.path.dirname(path), f"{_TMP}{secrets.token_hex(8)}")
        for last in reversed(range(_TRIES)):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                break
            except FileNotFoundError:  # another process removed the empty directory
                if not last:
                    raise
        try:
            try:
                if os.writev(fd, [data, trailer]) != len(data) + TRAILER_BYTES:
                    raise OSError(errno.ENOSPC, "incomplete write")
                inode = os.fstat(fd).st_ino
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            _unlink(temporary)
            raise
        return inode

    def _prepare(self) -> None:
        """Create the directory, readable only for its owner as it may hold private data, and determine the limit."""
        if self._ready:
            return
        with self._lock:
            if not self._ready:
                os.makedirs(os.path.dirname(self.folder), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
                self._limit = self._given_limit or self._first_limit()
                # A random start: many short processes together then check as often as one long process.
                self._until_check = random.randrange(self._step)
                self._ready = True

    def _first_limit(self) -> int:
        path = os.path.join(self.folder, LIMIT_FILE)
        with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
            return max(int(file.read(32)), 1)
        room = os.statvfs(self.folder)
        limit = max(room.f_bavail * room.f_frsize // SHARE, 1)
        temporary = os.path.join(self.folder, f"{_TMP}{secrets.token_hex(8)}")
        with open(temporary, "x", encoding="ascii") as file:
            file.write(f"{limit}\n")
        os.rename(temporary, path)
        return limit

    @property
    def _step(self) -> int:
        return max(self._limit // _CHECKS, BLOCK_BYTES)

    def _count(self, length: int) -> None:
        with self._lock:
            self._until_check -= length
            if self._until_check > 0 or not self._check_lock.acquire(blocking=False):
                return
            self._until_check = self._step
        try:
            self._evict()
        finally:
            self._check_lock.release()

    def _evict(self) -> None:
        """Delete the least recently used blocks if the limit is near. Other processes may do so at the same time."""
        blocks = sorted(_found(self.folder))
        total = sum(size for _, size, _ in blocks)
        if total + 2 * BLOCK_BYTES < self._limit - self._limit // _FULL:
            return
        emptied = set()
        for _, size, path in blocks:
            if total <= self._limit - self._limit // _LOW:
                break
            _unlink(path)
            emptied.add(os.path.dirname(path))
            total -= size
        for folder in emptied:
            with contextlib.suppress(OSError):
                os.rmdir(folder)

    def _refused(self, error: OSError) -> None:
        with self._lock:
            first, self._full = not self._full, True
        if first:
            emit(
                "cache.off",
                f"writing to {self.folder} failed ({error.strerror or error}): this process caches no more blocks",
                folder=self.folder,
                error=str(error),
            )


def name_of(url: str, key: str) -> str:
    """Return the cache's name of a file: 64 hexadecimal digits, the hash of store URL and key."""
    return digest(f"{url}\0{key}".encode(errors="surrogateescape")).hex()


_shared: dict[tuple[str, int | None], BlockCache] = {}
"""Caches by directory: stores of one process share the files and their limit."""
_shared_lock = threading.Lock()


def blocks_in(folder: str | os.PathLike[str], limit: int | None = None) -> BlockCache:
    """Return the cache in ``folder``: one object per process, so that threads fetch a block once even through different stores."""
    made = BlockCache(folder, limit)
    with _shared_lock:
        return _shared.setdefault((made.folder, limit), made)


def blocks_from_settings() -> BlockCache | None:
    """Return the cache of ``RELIGHT_CACHE`` and ``RELIGHT_CACHE_BYTES``; None without the first. Raise ``ConfigError`` if invalid."""
    now = environment()
    folder = now.cache
    if not folder:
        return None
    if "\0" in folder or "://" in folder:
        raise ConfigError("RELIGHT_CACHE must be a directory on a local disk", where=folder[:200])
    return blocks_in(folder, bytes_of(now.cache_bytes, "RELIGHT_CACHE_BYTES") if now.cache_bytes else None)


def _trailer(name: str, number: int, file_bytes: int, length: int, data_digest: bytes) -> bytes:
    """Return the trailer of a block. Its hash includes the file's name and the block's number."""
    fields = _TRAILER.pack(_MAGIC, file_bytes, length, data_digest)
    return fields + digest(fields + f"{name}/{number}".encode())


def _found(folder: str) -> Iterator[tuple[int, int, str]]:
    """Yield ``(time of last use in ns, bytes, path)`` of every block. Skip foreign files, and delete old temporaries."""
    for shelf in _names(folder, 2):
        for name in _names(shelf, 64):
            try:
                entries = list(os.scandir(name))
            except OSError:
                continue
            for entry in entries:
                is_temporary = entry.name.startswith(_TMP)
                if not is_temporary and not entry.name.isdecimal():
                    continue
                try:
                    seen = entry.stat(follow_symlinks=False)
                except OSError:  # gone meanwhile
                    continue
                if is_temporary and time.time() - seen.st_mtime > _STALE_S:
                    _unlink(entry.path)
                    continue
                yield seen.st_mtime_ns, seen.st_size, entry.path


def _names(folder: str, digits: int) -> list[str]:
    try:
        return [entry.path for entry in os.scandir(folder) if len(entry.name) == digits and _HEX.issuperset(entry.name)]
    except OSError:
        return []


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
