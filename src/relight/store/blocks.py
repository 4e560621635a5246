"""Blocks of files, kept in a directory of a local disk for whoever asks again; what was not asked for longest goes first.

A block is a file of its own: its bytes, and behind them a trailer with its length, the length of the whole file, and digests. It is
written under a temporary name and renamed, without fsync or lock, by any number of processes: one that is torn, damaged, or another's is
not taken, and one that vanishes was never there. Nothing here raises for the disk's sake. A disk that takes no more is told of once, and
then nothing more is kept.
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
from relight.policy.units import bytes_of

BLOCK_BYTES = 4 << 20
"""As long as the chunks of large tensors, and the pieces in which object stores are read."""
SHARE = 10
"""Of the room that is free when a directory is first used, a tenth is taken, if nobody says how much."""
LIMIT_FILE = "limit"
"""In the directory: that tenth, in bytes, so that it does not shrink as it fills."""
_FULL, _LOW, _LOOKS = 8, 4, 64
"""With an eighth of the limit left, the oldest go until a quarter is; each process looks whenever it has written one part in 64."""
_STALE_S = 3600.0
"""A temporary of that age is nobody's any more."""
_TRIES = 5
_MAGIC = b"relight block 1\n"
_TRAILER = struct.Struct("<16sQQ32s")
TRAILER_BYTES = _TRAILER.size + 32
_TMP = ".tmp-"
_HEX = frozenset("0123456789abcdef")


class BlockCache:
    """The blocks in ``folder``, ``limit`` bytes of them at most; None: what ``limit`` in it says, a tenth of what is free to begin with.

    Making it touches nothing. Threads may share it; so may processes, by each making its own. Up to eight that fill it at once stay below
    the limit.
    """

    def __init__(self, folder: str | os.PathLike[str], limit: int | None = None) -> None:
        self.folder = os.path.abspath(os.path.expanduser(os.fspath(folder)))
        self._told_limit = limit
        self._limit = limit or 0
        self._until_look = 0
        self._lock = threading.Lock()
        self._looking = threading.Lock()
        self._fetching: dict[tuple[str, int], threading.Event] = {}
        self._ready = self._full = False

    def __repr__(self) -> str:
        return f"Blocks({self.folder!r})"

    def __reduce__(self) -> tuple[object, ...]:
        return (blocks_in, (self.folder, self._told_limit))

    @property
    def takes_more(self) -> bool:
        """Whether anything is kept any more. It is not once the disk has refused."""
        return not self._full

    def file_bytes(self, name: str) -> int | None:
        """How long the whole file ``name`` is, as its first block tells; None if that is not here."""
        try:
            fd = self._open(name, 0)
        except OSError:
            return None
        try:
            length = os.fstat(fd).st_size - TRAILER_BYTES
            told = self._read_trailer(fd, name, 0, length)
        except OSError:
            return None
        finally:
            os.close(fd)
        return told[0] if told is not None else None

    def take(self, name: str, number: int, file_bytes: int, pieces: Sequence[memoryview]) -> int | None:
        """Fill ``pieces``, which are the block back to back, if it is here and sound: the inode it was read from. Else None, and they may
        hold anything."""
        length = sum(len(piece) for piece in pieces)
        trailer = memoryview(bytearray(TRAILER_BYTES))
        try:
            fd = self._open(name, number)
        except OSError:
            return None
        try:
            found = os.fstat(fd)
            if found.st_size != length + TRAILER_BYTES:
                return None
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_WILLNEED)  # all of it at once, not as readahead finds out
            if os.preadv(fd, [*pieces, trailer], 0) != found.st_size:
                return None
            hasher = Digest()
            for piece in pieces:
                hasher.update(piece)
            if trailer != _trailer(name, number, file_bytes, length, hasher.digest()):
                return None
            with contextlib.suppress(OSError):  # a disk that is full or read-only can be read all the same
                os.utime(fd)  # asked for just now: access times are often not written
        except OSError:
            return None
        finally:
            os.close(fd)
        return found.st_ino

    def take_part(self, name: str, number: int, inode: int, within: int, into: memoryview) -> bool:
        """Fill ``into`` from byte ``within`` of a block that ``take`` found sound; False if it is gone, or another file, by now."""
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
        """Put a block down, over whatever is there under its name: the inode it has now, None if nothing more is kept."""
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
        """Forget those blocks of a file; all of them without ``numbers``."""
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
        """True for whoever is to fetch the block; whoever comes meanwhile waits until that one is done, and gets False."""
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
            yield True
        finally:
            with self._lock:
                self._fetching.pop(key).set()

    def total_bytes(self) -> int:
        """What is kept, by all processes, in bytes. Cost: a look at every block's name."""
        return sum(size for _, size, _ in _found(self.folder))

    # -- inside

    def _folder(self, name: str) -> str:
        return os.path.join(self.folder, name[:2], name)

    def _path(self, name: str, number: int) -> str:
        return os.path.join(self._folder(name), str(number))

    def _open(self, name: str, number: int) -> int:
        return os.open(self._path(name, number), os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def _read_trailer(self, fd: int, name: str, number: int, length: int) -> tuple[int, bytes] | None:
        """The file's length, and the digest of the block."""
        if length < 0:
            return None
        data = os.pread(fd, TRAILER_BYTES, length)
        if len(data) != TRAILER_BYTES:  # cut meanwhile
            return None
        _, file_bytes, _, held = _TRAILER.unpack_from(data)
        return (file_bytes, held) if data == _trailer(name, number, file_bytes, length, held) else None

    def _write(self, path: str, data: memoryview, trailer: bytes) -> int:
        temporary = os.path.join(os.path.dirname(path), f"{_TMP}{secrets.token_hex(8)}")
        for last in reversed(range(_TRIES)):
            try:
                os.makedirs(os.path.dirname(path), exist_ok=True)
                fd = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
                break
            except FileNotFoundError:  # found empty by another process, and removed
                if not last:
                    raise
        try:
            try:
                if os.writev(fd, [data, trailer]) != len(data) + TRAILER_BYTES:
                    raise OSError(errno.ENOSPC, "only some of it was taken")
                inode = os.fstat(fd).st_ino
            finally:
                os.close(fd)
            os.rename(temporary, path)
        except OSError:
            _unlink(temporary)
            raise
        return inode

    def _prepare(self) -> None:
        """The directory, for its owner alone: it may hold what is not everybody's to read. And how much may be in it."""
        if self._ready:
            return
        with self._lock:
            if not self._ready:
                os.makedirs(os.path.dirname(self.folder), exist_ok=True)
                with contextlib.suppress(FileExistsError):
                    os.mkdir(self.folder, 0o700)
                self._limit = self._told_limit or self._first_limit()
                # Processes that live for less than a look's worth of bytes look as often, all together, as one that lives long.
                self._until_look = random.randrange(self._step)
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
        return max(self._limit // _LOOKS, BLOCK_BYTES)

    def _count(self, length: int) -> None:
        with self._lock:
            self._until_look -= length
            if self._until_look > 0 or not self._looking.acquire(blocking=False):
                return
            self._until_look = self._step
        try:
            self._evict()
        finally:
            self._looking.release()

    def _evict(self) -> None:
        """Remove what was asked for longest ago, if there is too much. Others may be at it too: what is gone is gone."""
        found = sorted(_found(self.folder))
        total = sum(size for _, size, _ in found)
        if total + 2 * BLOCK_BYTES < self._limit - self._limit // _FULL:
            return
        emptied = set()
        for _, size, path in found:
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
                f"{self.folder} takes no more ({error.strerror or error}): this process reads from afar what is not there yet",
                folder=self.folder,
                error=str(error),
            )


def name_of(url: str, key: str) -> str:
    """What a file is called here: 64 hexadecimal digits that stand for it and for its store."""
    return digest(f"{url}\0{key}".encode(errors="surrogateescape")).hex()


_shared: dict[tuple[str, int | None], BlockCache] = {}
_shared_lock = threading.Lock()


def blocks_in(folder: str | os.PathLike[str], limit: int | None = None) -> BlockCache:
    """Those in ``folder``: one object a process, so that its threads fetch nothing twice whichever store they ask."""
    made = BlockCache(folder, limit)
    with _shared_lock:
        return _shared.setdefault((made.folder, limit), made)


def blocks_from_settings() -> BlockCache | None:
    """As ``RELIGHT_CACHE`` and ``RELIGHT_CACHE_BYTES`` say; None without the first. ``ConfigError`` for what is no size."""
    folder = os.environ.get("RELIGHT_CACHE")
    if not folder:
        return None
    if "\0" in folder or "://" in folder:
        raise ConfigError("RELIGHT_CACHE is a directory of a local disk", where=folder[:200])
    text = os.environ.get("RELIGHT_CACHE_BYTES")
    return blocks_in(folder, bytes_of(text, "RELIGHT_CACHE_BYTES") if text else None)


def _trailer(name: str, number: int, file_bytes: int, length: int, held: bytes) -> bytes:
    """What stands behind a block: also that it is this one, of this file."""
    said = _TRAILER.pack(_MAGIC, file_bytes, length, held)
    return said + digest(said + f"{name}/{number}".encode())


def _found(folder: str) -> Iterator[tuple[int, int, str]]:
    """``(when asked for last, bytes, path)`` of every block. What is not ours is passed over, old temporaries are removed."""
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
        return [one.path for one in os.scandir(folder) if len(one.name) == digits and _HEX.issuperset(one.name)]
    except OSError:
        return []


def _unlink(path: str) -> None:
    with contextlib.suppress(OSError):
        os.unlink(path)
