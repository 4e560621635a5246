"""The files of somebody else's checkpoint: found without following links, read by offset, noticed if they change meanwhile."""

from __future__ import annotations

import builtins
import mmap
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from relight.errors import CheckpointNotFound, CorruptCheckpoint, IncompatibleState, StoreUnavailable, UnsafeContent
from relight.format import Digest
from relight.format.strict import from_json
from relight.importers.crc_ranges import Sums
from relight.importers.held import ValueCache

ENTRIES_MAX = 200_000
LEVELS_MAX = 8
JSON_BYTES_MAX = 64 << 20
SLAB_BYTES = 16 << 20
PIECE_BYTES = 1 << 20


class Stamp(NamedTuple):
    """By which a file is known to be the same as when it was first looked at."""

    size: int
    modified_ns: int
    inode: int


class Far(Protocol):
    """A file that lies elsewhere, and is read by ranges."""

    size: int

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into``, which lies within the file."""


Handle = int | Far
"""A descriptor, or what stands for one: for ``pread``, ``read_into`` and ``size_of``."""


class Files:
    """One file, or all files below one folder, by their names from there on with ``/``. Links below it are known, and never followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._set_up(os.path.realpath(os.fspath(path)))
        try:
            found = os.stat(self.path)
        except FileNotFoundError as error:
            raise CheckpointNotFound("there is nothing here", where=os.fspath(path)) from error
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"cannot be looked at: {error}", where=os.fspath(path)[:200]) from error
        self.is_folder = stat.S_ISDIR(found.st_mode)
        if self.is_folder:
            self._scan("", 0)
        elif stat.S_ISREG(found.st_mode):
            self.stamps[""] = Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
        else:
            raise IncompatibleState("neither a file nor a folder", where=os.fspath(path))

    def _set_up(self, path: str) -> None:
        self.path = path
        self.stamps: dict[str, Stamp] = {}
        self.folders: set[str] = set()
        self.others: dict[str, str] = {}
        """What is neither file nor folder, and what it is."""
        self.read: dict[str, bytes | None] = {}
        """What has been looked at whole, with the hash of that; None for what is to be read in pieces."""
        self.within: list[tuple[str, Files]] = []
        """Folders below that were looked at as checkpoints of their own."""
        self.sums = Sums()
        """Of what was read that has checksums."""
        self.held = ValueCache()

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    @property
    def in_bucket(self) -> bool:
        """Whether there is no path by which another library could open it."""
        return False

    def below(self, folder: str) -> Files:
        """A folder below, as if it had been named itself; what is read of it counts here too."""
        if folder not in self.folders:
            raise CorruptCheckpoint("the folder is missing, or a link", where=self.where(folder))
        inner = Files(self.where(folder))
        inner.sums, inner.held = self.sums, self.held
        self.within.append((folder, inner))
        return inner

    def has(self, name: str) -> bool:
        """Whether a file of that name is there."""
        return name in self.stamps

    def names(self, folder: str = "") -> list[str]:
        """Files directly in ``folder``, without it, sorted."""
        prefix = f"{folder}/" if folder else ""
        return sorted(
            name[len(prefix) :] for name in self.stamps if name.startswith(prefix) and "/" not in name[len(prefix) :] and name != prefix
        )

    def size(self, name: str) -> int:
        """Bytes of a file."""
        return self._stamp(name).size

    def where(self, name: str) -> str:
        """A file's path, for people."""
        return f"{self.path}/{name}" if name else self.path

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """A descriptor of the file, which is closed behind it. ``CorruptCheckpoint`` if it is not there, or another than it was."""
        stamp, where = self._stamp(name), self.where(name)
        try:
            handle = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailable(f"cannot be opened: {error.strerror}", where=where, hint="links are not followed") from error
        try:
            now = os.fstat(handle)
            if not stat.S_ISREG(now.st_mode) or Stamp(now.st_size, now.st_mtime_ns, now.st_ino) != stamp:
                raise CorruptCheckpoint("it has changed while it was read", where=where, hint="import it when nobody writes to it any more")
            yield handle
        except OSError as error:
            raise StoreUnavailable(f"cannot be read: {error.strerror}", where=where) from error
        finally:
            os.close(handle)

    @contextmanager
    def mapped(self, name: str, offset: int, length: int) -> Iterator[mmap.mmap]:
        """Bytes of the file, mapped; ``offset`` is a multiple of a map's granularity."""
        with self.open(name) as handle:
            assert isinstance(handle, int)
            yield mmap.mmap(handle, length, prot=mmap.PROT_READ, offset=offset)  # closed with the last array on it

    def bytes(self, name: str, limit: int) -> bytes:
        """All of a file that may not be larger than ``limit``."""
        size, where = self.size(name), self.where(name)
        if size > limit:
            raise UnsafeContent(f"{size} bytes where at most {limit} are looked at", where=where)
        with self.open(name) as handle:
            data = pread(handle, 0, size, where)
        self.read[name] = Digest(data).digest()
        return data

    def pieces(self, name: str, limit: int) -> Iterator[builtins.bytes]:
        """All of a file that may not be larger than ``limit``, a megabyte at a time."""
        size, where = self.size(name), self.where(name)
        if size > limit:
            raise UnsafeContent(f"{size} bytes where at most {limit} are looked at", where=where)
        hasher = Digest()
        with self.open(name) as handle:
            for piece in pieces_of(handle, 0, size, where):
                hasher.update(piece)
                yield piece
        self.read[name] = hasher.digest()

    def json(self, name: str) -> object:
        """What a JSON file says. ``CorruptCheckpoint`` if it is none, ``UnsafeContent`` if it is absurd."""
        return from_json(_finite(self.bytes(name, JSON_BYTES_MAX)), self.where(name), JSON_BYTES_MAX)

    def text(self, name: str, limit: int = 4096) -> str:
        """A small text file, without the white space around it."""
        try:
            return self.bytes(name, limit).decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint("not text", where=self.where(name)) from error

    def digest(self) -> str:
        """One hash of the files that were used: names, sizes, times, and the bytes of what says how to read them."""
        hasher = Digest()
        for name in sorted(self.read):
            stamp = self.stamps[name]
            hasher.update(f"{name}\0{stamp.size}\0{stamp.modified_ns}\0".encode(errors="surrogatepass"))
            hasher.update(self.read[name] or b"")
        for folder, inner in self.within:
            hasher.update(f"{folder}\0{inner.digest()}".encode(errors="surrogatepass"))
        return hasher.digest().hex()

    @property
    def bytes_read(self) -> int:
        """Bytes of the files that were used."""
        return sum(self.stamps[name].size for name in self.read) + sum(inner.bytes_read for _, inner in self.within)

    def check_unchanged(self) -> None:
        """``CorruptCheckpoint`` if a file that was used is not what it was, or has not the bytes that it says."""
        self.sums.check(self.path)
        for name in self.read:
            with self.open(name):
                pass
        for _, inner in self.within:
            inner.check_unchanged()

    def inside(self, name: object, where: str) -> str:
        """A name that a file gives for another, checked: a plain one, without a way out, of a file that is there."""
        if (
            not isinstance(name, str)
            or name.startswith("/")
            or "\\" in name
            or "\0" in name
            or any(p in ("", ".", "..") for p in name.split("/"))
        ):
            raise UnsafeContent(f"it names a file outside of the folder: {str(name)[:80]!r}", where=where)
        if not self.has(name):
            raise CorruptCheckpoint(f"{name[:120]} is missing", where=where)
        return name

    def _stamp(self, name: str) -> Stamp:
        if name in self.others:
            raise UnsafeContent(
                f"{self.others[name]}, which is not followed", where=self.where(name), hint="copy the files themselves: cp -rL"
            )
        if name not in self.stamps:
            raise CorruptCheckpoint("the file is missing", where=self.where(name))
        self.read.setdefault(name, None)
        return self.stamps[name]

    def _scan(self, folder: str, level: int) -> None:
        try:
            with os.scandir(f"{self.path}/{folder}" if folder else self.path) as entries:
                for entry in entries:
                    name = f"{folder}/{entry.name}" if folder else entry.name
                    if len(self.stamps) + len(self.folders) + len(self.others) >= ENTRIES_MAX:
                        raise UnsafeContent(f"more than {ENTRIES_MAX} files", where=self.path)
                    found = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(found.st_mode):
                        self.stamps[name] = Stamp(found.st_size, found.st_mtime_ns, found.st_ino)
                    elif stat.S_ISDIR(found.st_mode):
                        self.folders.add(name)
                        if level < LEVELS_MAX:
                            self._scan(name, level + 1)
                    else:
                        self.others[name] = "a link" if stat.S_ISLNK(found.st_mode) else "not a regular file"
        except OSError as error:
            raise StoreUnavailable(f"cannot be listed: {error.strerror}", where=self.where(folder)) from error


def _finite(data: bytes) -> bytes:
    """JSON in which some write NaN and infinities as bare words: those become the texts that Relight's format has for them."""
    if not any(word in data for word in (b"NaN", b"Infinity")):
        return data
    import re

    token = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
    words = {b"NaN": b'"nan"', b"Infinity": b'"inf"', b"-Infinity": b'"-inf"'}
    return token.sub(lambda match: words.get(match[0], match[0]), data)


def size_of(handle: Handle) -> int:
    """Bytes of an open file."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def pread(handle: Handle, offset: int, length: int, where: str) -> bytes:
    """All of these bytes; ``CorruptCheckpoint`` if the file is shorter."""
    if offset + length > size_of(handle):  # before memory is made for it
        raise CorruptCheckpoint("the file ends too soon", where=where)
    found = bytearray(length)
    read_into(handle, offset, memoryview(found), where)
    return bytes(found)


def pieces_of(handle: Handle, offset: int, length: int, where: str) -> Iterator[bytes]:
    """These bytes, a megabyte at a time; ``CorruptCheckpoint`` if the file is shorter."""
    for start in range(offset, offset + length, PIECE_BYTES):
        yield pread(handle, start, min(PIECE_BYTES, offset + length - start), where)


def read_into(handle: Handle, offset: int, into: memoryview, where: str) -> None:
    """Fill ``into``; ``CorruptCheckpoint`` if the file is shorter."""
    if not isinstance(handle, int):
        if offset + len(into) > handle.size:
            raise CorruptCheckpoint("the file ends too soon", where=where)
        handle.read_into(offset, into)
        return
    at = 0
    while at < len(into):
        count = os.preadv(handle, [into[at : at + (64 << 20)]], offset + at)
        if not count:
            raise CorruptCheckpoint("the file ends too soon", where=where)
        at += count
