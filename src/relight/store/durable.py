"""Durability, written once: the order of write, fsync, close, link and fsync of directories that survives a power cut.

Why each step (a cut right behind a missing one loses what is named):

1. ``fallocate``: a full disk is an error before any byte is written, not a hole in the middle.
2. fsync of the *file*: without it a name can survive with no bytes behind it.
3. checked ``close``: NFS and quotas report there what they did not earlier.
4. ``link`` to the final name (log records): exclusive; ``rename`` would replace silently.
5. fsync of the *directory*: without it the name itself is lost.
6. fsync of the *parent* when a directory is new: without it the whole directory is lost.

A failed fsync poisons the file: Linux marks the pages clean, so a second fsync would report a success that never was. It is never
tried twice; the caller starts again with a new file. (P. Rebello et al., "Can applications recover from fsync failures?", ATC 2020.)
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import re
import secrets
import stat
import threading

from relight.errors import CheckpointNotFound, CorruptCheckpoint, NoSpace, RelightError, StoreUnavailable, UnsafeContent
from relight.store.base import Uncertain
from relight.store.disk import Disk

ALIGN = 4096
_WINDOW = 256 << 20
TMP_PREFIX = ".tmp-"
_TEMPORARY = re.compile(re.escape(TMP_PREFIX) + r"(.+)-[0-9a-f]{16}\Z")
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def translate(error: OSError, doing: str, path: str) -> RelightError:
    """An operating system's error as one of ours, saying what was being done and what to do about it."""
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    what = f"{doing} failed: {name}, {os.strerror(code) if code else error}"
    if code in _FULL:
        return NoSpace(what, where=path, hint="make room on the disk, raise the quota, or keep fewer checkpoints (relight prune)")
    if code in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointNotFound(what, where=path)
    if code == errno.ENXIO:
        return UnsafeContent("a socket or a device where a file of the store should be", where=path)
    if code == errno.ELOOP:
        return UnsafeContent("a symbolic link where a file of the store should be", where=path)
    if code == errno.EROFS:
        return StoreUnavailable(what, where=path, hint="the file system is read-only: remount it, or choose another store")
    if code in (errno.EACCES, errno.EPERM):
        return StoreUnavailable(what, where=path, hint="check who owns the directory and its permissions", retryable=False)
    return StoreUnavailable(what, where=path)


class NewFile:
    """A new file from its creation to its durability. Not durable by name until its directory is fsynced."""

    def __init__(self, disk: Disk, path: str, size: int, *, direct: bool) -> None:
        self._disk, self._path, self._size = disk, path, size
        self._fd = -1
        self.align = 1
        try:
            if direct:
                try:
                    self._fd = disk.open_new(path, direct=True)
                    self.align = ALIGN
                except OSError as error:
                    if error.errno != errno.EINVAL:  # the file system has no direct I/O: open as usual
                        raise
                    with contextlib.suppress(OSError):  # some create the file before they refuse
                        disk.unlink(path)
            if self._fd < 0:
                self._fd = disk.open_new(path)
            if size:
                try:
                    disk.fallocate(self._fd, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
        except OSError as error:
            if self._fd >= 0:
                self.abort()
            raise translate(error, "creating a file", path) from error

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``, however many calls it takes."""
        data = data.cast("B")
        try:
            while data:
                written = self._disk.pwrite(self._fd, data, offset)
                if written <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                data, offset = data[written:], offset + written
        except OSError as error:
            raise translate(error, "writing", self._path) from error

    def finish(self) -> None:
        """Cut to length, fsync, close. Any error poisons the file."""
        try:
            if self.align > 1 and self._size % self.align:
                self._disk.truncate(self._fd, self._size)
            self._disk.fsync(self._fd)
            fd, self._fd = self._fd, -1
            self._disk.close(fd)
        except OSError as error:
            raise translate(error, "making a file durable", self._path) from error

    def abort(self) -> None:
        """Close and remove; what cannot be removed is swept later, once its attempt is fenced."""
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self._disk.unlink(self._path)


def sync_dir(disk: Disk, path: str) -> None:
    """Make the names in a directory durable.

    It is looked at behind the fsync: an XFS that has shut itself down, as it does when its disk fails, says of a directory's fsync that all
    is well, though the names are lost, and of everything else EIO (seen with Linux 6.18).
    """
    try:
        fd = disk.open_dir(path)
        try:
            disk.fsync(fd)
            disk.fstat(fd)
        finally:
            disk.close(fd)
    except OSError as error:
        raise translate(error, "making names durable", path) from error


def make_dirs(disk: Disk, root: str, path: str) -> None:
    """Make ``path`` and what is missing between it and ``root``; each new directory is durable in its parent before it is used."""
    missing = []
    while path != root:
        try:
            mode = disk.lstat(path).st_mode
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
            continue
        except OSError as error:
            raise translate(error, "looking at", path) from error
        if not stat.S_ISDIR(mode):
            raise UnsafeContent("not a directory, or a symbolic link, where a directory of the store should be", where=path)
        break
    for new in reversed(missing):
        try:
            disk.mkdir(new)
        except FileExistsError:  # somebody else was first: it may not be durable yet all the same
            pass
        except OSError as error:
            raise translate(error, "making a directory", new) from error
        sync_dir(disk, os.path.dirname(new))


def create_once(disk: Disk, path: str, data: bytes) -> bool:
    """Create ``path`` holding ``data``, durably, unless it exists: exactly one caller ever gets True for a name.

    ``link`` is the moment it exists. On an error whose outcome the call's own reply does not tell (NFS loses replies) the link count
    decides; if that cannot be read, or the directory cannot be fsynced after the link, ``Uncertain``.
    """
    directory, name = os.path.split(path)
    temporary = os.path.join(directory, f"{TMP_PREFIX}{name}-{secrets.token_hex(8)}")
    file = NewFile(disk, temporary, len(data), direct=False)
    try:
        file.write_at(0, memoryview(data))
        file.finish()
    except BaseException:
        file.abort()
        raise
    try:
        created = _link(disk, temporary, path)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
    if created:
        try:
            sync_dir(disk, directory)
        except RelightError as error:
            raise Uncertain(f"created, but it may not survive a power cut: {error.what}", where=path) from error
    return created


def _link(disk: Disk, temporary: str, path: str) -> bool:
    try:
        disk.link(temporary, path)
    except OSError as error:
        try:
            links = disk.lstat(temporary).st_nlink
        except OSError as second:
            if isinstance(second, FileNotFoundError) and _is_there(disk, path):
                return False  # swept, as temporaries of names that are taken are
            raise Uncertain(f"cannot tell whether a name was created: {second}", where=path) from error
        if links == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        raise translate(error, "creating a name", path) from error
    return True


def _is_there(disk: Disk, path: str) -> bool:
    try:
        disk.lstat(path)
    except OSError:
        return False
    return True


def temporary_of(name: str) -> str | None:
    """The name that a file called ``name`` was on the way to, None if it is no temporary of ``create_once``."""
    match = _TEMPORARY.match(name)
    return match[1] if match else None


class OpenFile:
    """A regular file of the store, open for reading; past the page cache, where possible, if it has ``direct_from`` bytes or more."""

    def __init__(self, disk: Disk, path: str, *, direct_from: int | None = None) -> None:
        self._disk, self._path = disk, path
        self._direct = -1
        self._windows: dict[int, bytes] = {}
        self._lock = threading.Lock()
        try:
            self._fd = disk.open_read(path)
        except OSError as error:
            raise translate(error, "opening", path) from error
        try:
            found = disk.fstat(self._fd)
        except OSError as error:
            self.close()
            raise translate(error, "looking at", path) from error
        if not stat.S_ISREG(found.st_mode):
            self.close()
            raise UnsafeContent("not a regular file", where=path)
        self.size = found.st_size
        if direct_from is not None and self.size >= direct_from:
            with contextlib.suppress(OSError):  # not on this file system, or without /proc: through the cache, then
                self._direct = disk.reopen_direct(self._fd)

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """See ``Reader``."""
        if self._direct < 0 or self._cached(offset, length):
            return None
        begin = offset - offset % ALIGN
        end = -(-(offset + length) // ALIGN) * ALIGN
        needed, got = offset + length - begin, 0
        try:
            while got < needed and got % ALIGN == 0:
                read = self._disk.preadv(self._direct, room[got : end - begin], begin + got)
                if read <= 0:
                    raise CorruptCheckpoint(f"the file ends at byte {begin + got}, sooner than it should", where=self._path)
                got += read
        except OSError as error:
            if error.errno == errno.EINVAL:  # this device wants another alignment
                return None
            raise translate(error, f"reading at byte {begin + got}", self._path) from error
        if got < needed:
            self.read_into(begin + got, room[got:needed])
        return room[offset - begin : needed]

    def _cached(self, offset: int, length: int) -> bool:
        if offset + length > self.size:
            return True  # read_into says what is wrong with that
        while length:
            window, within = divmod(offset, _WINDOW)
            step = min(length, _WINDOW - within)
            if self._window(window).find(0, within // mmap.PAGESIZE, -(-(within + step) // mmap.PAGESIZE)) >= 0:
                return False
            offset, length = offset + step, length - step
        return True

    def _window(self, number: int) -> bytes:
        """Which pages of a window were in the cache when it was first asked for. Asking takes the lock that page faults and reads take."""
        with self._lock:
            if number not in self._windows:
                begin = number * _WINDOW
                size = min(_WINDOW, self.size - begin)
                try:
                    self._windows[number] = self._disk.resident(self._fd, begin, size)
                except (OSError, ValueError):
                    self._windows[number] = b"\0" * -(-size // mmap.PAGESIZE)
            return self._windows[number]

    def read_into(self, offset: int, into: memoryview) -> None:
        """Fill ``into`` from ``offset``."""
        into = into.cast("B")
        try:
            while into:
                got = self._disk.preadv(self._fd, into, offset)
                if got <= 0:
                    raise CorruptCheckpoint(f"the file ends at byte {offset}, sooner than it should", where=self._path)
                into, offset = into[got:], offset + got
        except OSError as error:
            raise translate(error, f"reading at byte {offset}", self._path) from error

    def close(self) -> None:
        """Close; nothing can be lost by it."""
        for fd in (self._fd, self._direct):
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._disk.close(fd)
        self._fd = self._direct = -1
