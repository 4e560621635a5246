"""The files of a foreign checkpoint: listed without following links, read by offset, checked for changes meanwhile."""

from __future__ import annotations

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

ENTRIES_MAX = 200_000
LEVELS_MAX = 8
JSON_BYTES_MAX = 64 << 20
SLAB_BYTES = 16 << 20


class Stamp(NamedTuple):
    """Size, time and inode, by which a changed file is detected."""

    size: int
    modified_ns: int
    inode: int


class Far(Protocol):
    """A remote file, which is read by ranges."""

    size: int

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``; the range is inside the file."""


Handle = int | Far
"""A descriptor, or a remote file: for ``pread``, ``read_into`` and ``size_of``."""


LINK = "a link"


class Files:
    """One file, or all files below one folder, by relative names with ``/``. Links are listed, and never followed."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._set_up(os.path.realpath(os.fspath(path)))
        try:
            status = os.stat(self.path)
        except FileNotFoundError as error:
            raise CheckpointNotFound("this path does not exist", where=os.fspath(path)) from error
        except (OSError, ValueError) as error:
            raise StoreUnavailable(f"cannot be read: {error}", where=os.fspath(path)[:200]) from error
        self.is_folder = stat.S_ISDIR(status.st_mode)
        if self.is_folder:
            self._scan("", 0)
        elif stat.S_ISREG(status.st_mode):
            self.stamps[""] = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
        else:
            raise IncompatibleState("neither a file nor a folder", where=os.fspath(path))

    def _set_up(self, path: str) -> None:
        self.path = path
        self.stamps: dict[str, Stamp] = {}
        self.folders: set[str] = set()
        self.others: dict[str, str] = {}
        """Entries that are neither file nor folder, and their kind."""
        self.read: dict[str, bytes | None] = {}
        """Hashes of files that were read completely; None for files that are read in ranges."""
        self.within: list[tuple[str, Files]] = []
        """Subfolders that were read as separate checkpoints."""
        self.sums = Sums()
        """Checksums of the ranges that were read."""

    @property
    def name(self) -> str:
        """The last part of the path."""
        return os.path.basename(self.path)

    def below(self, folder: str) -> Files:
        """Return a subfolder as ``Files``. Files that are read there count as read here, too."""
        if folder not in self.folders:
            raise CorruptCheckpoint("the folder is missing, or a link", where=self.where(folder))
        inner = Files(self.where(folder))
        inner.sums = self.sums
        self.within.append((folder, inner))
        return inner

    def has(self, name: str) -> bool:
        """Return whether there is a file of that name."""
        return name in self.stamps

    def names(self, folder: str = "") -> list[str]:
        """Return the names of the files directly in ``folder``, sorted."""
        prefix = f"{folder}/" if folder else ""
        return sorted(
            name[len(prefix) :]
            for name in self.stamps
            if name.startswith(prefix) and "/" not in name[len(prefix) :] and name != prefix
        )

    def size(self, name: str) -> int:
        """Return the file's size in bytes."""
        return self._stamp(name).size

    def where(self, name: str) -> str:
        """Return the file's path, for messages."""
        return f"{self.path}/{name}" if name else self.path

    @contextmanager
    def open(self, name: str) -> Iterator[Handle]:
        """Open the file for a ``with`` block. Raise ``CorruptCheckpoint`` if it is missing, or has changed."""
        stamp, where = self._stamp(name), self.where(name)
        try:
            handle = os.open(where, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as error:
            raise StoreUnavailable(
                f"cannot be opened: {error.strerror}", where=where, hint="links are not followed"
            ) from error
        try:
            now = os.fstat(handle)
            if not stat.S_ISREG(now.st_mode) or Stamp(now.st_size, now.st_mtime_ns, now.st_ino) != stamp:
                raise CorruptCheckpoint(
                    "it has changed while it was read", where=where, hint="import it when no process writes to it"
                )
            yield handle
        except OSError as error:
            raise StoreUnavailable(f"cannot be read: {error.strerror}", where=where) from error
        finally:
            os.close(handle)

    @contextmanager
    def mapped(self, name: str, offset: int, length: int) -> Iterator[mmap.mmap]:
        """Map a range of the file; ``offset`` is a multiple of the allocation granularity."""
        with self.open(name) as handle:
            assert isinstance(handle, int)
            yield mmap.mmap(handle, length, prot=mmap.PROT_READ, offset=offset)  # closed with the last array on it

    def bytes(self, name: str, limit: int) -> bytes:
        """Return the whole file. Raise ``UnsafeContent`` if it is larger than ``limit``."""
        size, where = self.size(name), self.where(name)
        if size > limit:
            raise UnsafeContent(f"{size} bytes, but at most {limit} are read", where=where)
        with self.open(name) as handle:
            data = pread(handle, 0, size, where)
        self.read[name] = Digest(data).digest()
        return data

    def json(self, name: str) -> object:
        """Return the content of a JSON file. Raise ``CorruptCheckpoint`` if it is invalid, ``UnsafeContent`` if it
        exceeds a limit."""
        return from_json(_finite(self.bytes(name, JSON_BYTES_MAX)), self.where(name), JSON_BYTES_MAX)

    def text(self, name: str, limit: int = 4096) -> str:
        """Return the content of a small text file, without surrounding white space."""
        try:
            return self.bytes(name, limit).decode("utf-8").strip()
        except UnicodeDecodeError as error:
            raise CorruptCheckpoint("not text", where=self.where(name)) from error

    def digest(self) -> str:
        """Return one hash of the files that were used: names, sizes, times, and the bytes of files with metadata."""
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
        """Raise ``CorruptCheckpoint`` if a file that was used has changed, or does not match its checksums."""
        self.sums.check(self.path)
        for name in self.read:
            with self.open(name):
                pass
        for _, inner in self.within:
            inner.check_unchanged()

    def inside(self, name: object, where: str) -> str:
        """Return a file name from another file's content, after checking that it is in this folder and exists."""
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
                f"{self.others[name]}, which is not followed",
                where=self.where(name),
                hint="copy the files themselves: cp -rL",
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
                    status = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(status.st_mode):
                        self.stamps[name] = Stamp(status.st_size, status.st_mtime_ns, status.st_ino)
                    elif stat.S_ISDIR(status.st_mode):
                        self.folders.add(name)
                        if level < LEVELS_MAX:
                            self._scan(name, level + 1)
                    else:
                        self.others[name] = LINK if stat.S_ISLNK(status.st_mode) else "not a regular file"
        except OSError as error:
            raise StoreUnavailable(f"cannot be listed: {error.strerror}", where=self.where(folder)) from error


def _finite(data: bytes) -> bytes:
    """Replace NaN and infinities, which some programs write as bare words, by the strings that Relight's format uses."""
    if not any(word in data for word in (b"NaN", b"Infinity")):
        return data
    import re

    token = re.compile(rb'"(?:[^"\\]|\\.)*"|-?Infinity|NaN')
    words = {b"NaN": b'"nan"', b"Infinity": b'"inf"', b"-Infinity": b'"-inf"'}
    return token.sub(lambda match: words.get(match[0], match[0]), data)


def size_of(handle: Handle) -> int:
    """Return the size of an open file in bytes."""
    return os.fstat(handle).st_size if isinstance(handle, int) else handle.size


def pread(handle: Handle, offset: int, length: int, where: str) -> bytes:
    """Return exactly these bytes. Raise ``CorruptCheckpoint`` if the file is shorter."""
    if offset + length > size_of(handle):  # before memory is allocated
        raise CorruptCheckpoint("the file ends too soon", where=where)
    data = bytearray(length)
    read_into(handle, offset, memoryview(data), where)
    return bytes(data)


def read_into(handle: Handle, offset: int, into: memoryview, where: str) -> None:
    """Fill ``into``. Raise ``CorruptCheckpoint`` if the file is shorter."""
    if not isinstance(handle, int):
        if offset + len(into) > handle.size:
            raise CorruptCheckpoint("the file ends too soon", where=where)
        handle.read_into(offset, into)
        return
    position = 0
    while position < len(into):
        count = os.preadv(handle, [into[position : position + (64 << 20)]], offset + position)
        if not count:
            raise CorruptCheckpoint("the file ends too soon", where=where)
        position += count
