"""Durable files: the order of write, fsync, close, link and fsync of directories that survives a power cut.

Reason for each step, and what a power cut loses without it:

1. ``fallocate``: a full disk is an error before any byte is written, not a hole in the middle.
2. fsync of the *file*: without it, a name can survive without its bytes.
3. checked ``close``: NFS and quotas may report errors only there.
4. ``link`` to the final name (log records): exclusive; ``rename`` would replace silently. Replies to it can be lost: see ``_link``.
5. fsync of the *directory*: without it the name itself is lost.
6. fsync of the *parent* when a directory is new: without it the whole directory is lost.

A failed fsync poisons the file: Linux marks the pages clean, so a second fsync would report a false success. A failed fsync is never
retried; the caller starts again with a new file. (P. Rebello et al., "Can applications recover from fsync failures?", ATC 2020.)
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
STALE_ERRORS = (errno.ESTALE, errno.EBADF)
"""Error codes of a handle that the server no longer knows; EBADF if the server restarted after the file was deleted (Linux)."""
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_ROOM_HINT = "make room on the disk, raise the quota, or keep fewer checkpoints (relight prune)"
_ASKED_FROM = 1 << 20
"""Smallest file size that is compared with the free space if the file system cannot reserve space."""


class StaleHandle(StoreUnavailable):
    """An open file or a cached name no longer exists on the server: another machine deleted or replaced it."""


def translate(error: OSError, doing: str, path: str) -> RelightError:
    """Return the ``RelightError`` for an ``OSError``, with the operation ``doing`` and a hint."""
    code = error.errno or 0
    name = errno.errorcode.get(code, str(code))
    what = f"{doing} failed: {os.strerror(code)} ({name})" if code else f"{doing} failed: {error}"
    if code in _FULL:
        return NoSpace(what, where=path, hint=_ROOM_HINT)
    if code in STALE_ERRORS:
        return StaleHandle(
            what, where=path, hint="another machine deleted or replaced it, or the server lost it in a restart"
        )
    if code in (errno.ENOENT, errno.ENOTDIR):
        return CheckpointNotFound(what, where=path)
    if code == errno.ENXIO:
        return UnsafeContent("a socket or a device where a file of the store should be", where=path)
    if code == errno.ELOOP:
        hint = "links in a store are not followed: put the file itself here"
        return UnsafeContent("a symbolic link where a file of the store should be", where=path, hint=hint)
    if code == errno.EROFS:
        return StoreUnavailable(
            what, where=path, hint="the file system is read-only: remount it, or choose another store"
        )
    if code in (errno.EACCES, errno.EPERM):
        return StoreUnavailable(
            what, where=path, hint="check who owns the directory and its permissions", retryable=False
        )
    return StoreUnavailable(what, where=path)


def is_memory(folder: str) -> bool:
    """Return whether ``folder`` is on tmpfs. Direct I/O there, even if accepted, only adds a copy."""
    try:
        device = os.stat(folder).st_dev
        with open("/proc/self/mountinfo", encoding="utf-8", errors="replace") as mounts:
            device_id = f"{os.major(device)}:{os.minor(device)}"
            return any(line.split(" ")[2:3] == [device_id] and " - tmpfs " in line for line in mounts)
    except OSError:
        return False


class NewFile:
    """A new file, from creation to durable contents. Its name is durable only after its directory is fsynced."""

    def __init__(self, disk: Disk, path: str, size: int, *, direct: bool) -> None:
        self._disk, self._path, self._size = disk, path, size
        self._fd, self._aborted = -1, False
        self.align = 1
        self.inode = 0
        """Inode number, set by ``finish``."""
        try:
            if direct:
                try:
                    self._fd = disk.open_new(path, direct=True)
                    self.align = ALIGN
                except OSError as error:
                    if error.errno != errno.EINVAL:  # EINVAL: no direct I/O on this file system, so open it buffered
                        raise
                    with contextlib.suppress(OSError):  # some file systems create the file before they refuse
                        disk.unlink(path)
            if self._fd < 0:
                self._fd = disk.open_new(path)
            if size:
                try:
                    disk.fallocate(self._fd, size)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
                    self._ask_for_room()
        except OSError as error:
            if self._fd >= 0:
                self.abort()
            raise translate(error, "creating a file", path) from error

    def _ask_for_room(self) -> None:
        """Raise ENOSPC for a file larger than the free space, if space cannot be reserved. Quotas and other writers show only at fsync."""
        if self._size >= _ASKED_FROM and self._disk.free_bytes(os.path.dirname(self._path)) < self._size:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``, in as many calls as needed."""
        data = data.cast("B")
        try:
            while data:
                written = self._disk.pwrite(self._fd, data, offset)
                if written <= 0:
                    raise OSError(errno.EIO, "nothing was written")
                data, offset = data[written:], offset + written
        except OSError as error:
            raise translate(error, "writing a file", self._path) from error

    def finish(self, size: int | None = None) -> None:
        """Truncate to length, fsync, close. Any error poisons the file."""
        cut = size is not None and size < self._size
        self._size = self._size if size is None else size
        try:
            if cut or (self.align > 1 and self._size % self.align):
                self._disk.truncate(self._fd, self._size)
            self._disk.fsync(self._fd)
            self.inode = self._disk.fstat(self._fd).st_ino
            fd, self._fd = self._fd, -1
            self._disk.close(fd)
        except OSError as error:
            raise translate(error, "making a file durable", self._path) from error

    def abort(self) -> None:
        """Close and delete, once: the name may be another file's later. If the deletion fails, a sweep deletes the file after its attempt
        is fenced."""
        if self._aborted:
            return
        self._aborted = True
        if self._fd >= 0:
            with contextlib.suppress(OSError):
                self._disk.close(self._fd)
            self._fd = -1
        with contextlib.suppress(OSError):
            self._disk.unlink(self._path)


def sync_dir(disk: Disk, path: str) -> None:
    """Make the names in a directory durable.

    The fstat after the fsync detects an XFS that has shut down after a disk failure: its fsync of a directory reports success although the
    names are lost, and other calls fail with EIO (seen with Linux 6.18).
    """
    try:
        fd = disk.open_dir(path)
        try:
            disk.fsync(fd)
            disk.fstat(fd)
        except BaseException:
            with contextlib.suppress(OSError):  # the first error has the cause
                disk.close(fd)
            raise
        disk.close(fd)
    except OSError as error:
        raise translate(error, "making file names durable", path) from error


def make_dirs(disk: Disk, root: str, path: str) -> None:
    """Create ``path`` and missing directories between it and ``root``. Each is made durable in its parent before it is used."""
    missing = []
    while path != root:
        try:
            mode = disk.lstat(path).st_mode
        except FileNotFoundError:
            missing.append(path)
            path = os.path.dirname(path)
            continue
        except OSError as error:
            raise translate(error, "reading the attributes of a file", path) from error
        if not stat.S_ISDIR(mode):
            raise UnsafeContent(
                "not a directory, or a symbolic link, where a directory of the store should be", where=path
            )
        break
    for new in reversed(missing):
        try:
            disk.mkdir(new)
        except FileExistsError:  # another process was first: the directory may not be durable yet
            pass
        except OSError as error:
            raise translate(error, "making a directory", new) from error
        sync_dir(disk, os.path.dirname(new))


REWRITTEN_PREFIX = ".rekey-"


def rewritten_of(name: str) -> str:
    """Return the target name of a replacement file that a killed process left; empty for other names."""
    inside, _, drawn = name.removeprefix(REWRITTEN_PREFIX).rpartition("-")
    return inside if name.startswith(REWRITTEN_PREFIX) and re.fullmatch(r"[0-9a-f]{16}", drawn) else ""


class Replacement:
    """A file that atomically replaces another: written next to it, made durable, and renamed over it."""

    def __init__(self, disk: Disk, path: str, size: int, *, direct: bool) -> None:
        self._disk, self._path = disk, path
        directory, name = os.path.split(path)
        self.temporary = os.path.join(directory, f"{REWRITTEN_PREFIX}{name}-{secrets.token_hex(8)}")
        """Path of the file until ``finish``."""
        self._file = NewFile(disk, self.temporary, size, direct=direct)
        self.align = self._file.align

    def write_at(self, offset: int, data: memoryview) -> None:
        """See ``Writer``."""
        self._file.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        """See ``Writer``. Also makes the name durable."""
        self._file.finish(size)
        try:
            self._give_name()
        except OSError as error:
            raise translate(error, "replacing a file", self._path) from error
        sync_dir(self._disk, os.path.dirname(self._path))

    def _give_name(self) -> None:
        self._disk.replace(self.temporary, self._path)

    def abort(self) -> None:
        """See ``Writer``."""
        self._file.abort()


class JoinedFile:
    """A file that another process has created, and that several processes write: through the page cache, as they share pages."""

    align = 1

    def __init__(self, path: str) -> None:
        self._path, self._fd = path, -1

    def write_at(self, offset: int, data: memoryview) -> None:
        """See ``Writer``."""
        try:
            if self._fd < 0:
                self._fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            write_all(self._fd, data.cast("B"), offset)
        except OSError as error:
            raise translate(error, "writing a file", self._path) from error

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes."""
        self.write_at(offset, memoryview(data))

    def finish(self, size: int | None = None) -> None:
        """Make what was written durable, and close. The next write opens the file again."""
        if self._fd < 0:
            return
        fd, self._fd = self._fd, -1
        try:
            os.fdatasync(fd)
        except OSError as error:
            raise translate(error, "making a file durable", self._path) from error
        finally:
            os.close(fd)

    def abort(self) -> None:
        """Close. The file is its creator's, who deletes it."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def write_all(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``, in as many calls as needed."""
    while data:
        written = os.pwrite(fd, data, offset)
        offset, data = offset + written, data[written:]


class Addition(Replacement):
    """A file that is written under another name, and gets its name only if no file has it by then."""

    def _give_name(self) -> None:
        with contextlib.suppress(FileExistsError):
            self._disk.link(self.temporary, self._path)
        self._disk.unlink(self.temporary)


def create_once(disk: Disk, path: str, data: bytes) -> bool:
    """Create ``path`` with ``data``, durably. Return False if it exists: exactly one caller ever gets True for a name.

    ``link`` creates the name. If its reply was lost (NFS), the link count decides, or which file has the name. Raise ``Uncertain`` if
    neither can be read, or if the directory cannot be fsynced after the link.
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
        created = _link(disk, temporary, path, file.inode)
    finally:
        with contextlib.suppress(OSError):
            disk.unlink(temporary)
    if created:
        try:
            sync_dir(disk, directory)
        except RelightError as error:
            raise Uncertain(f"created, but it may not survive a power cut: {error.what}", where=path) from error
    return created


def _link(disk: Disk, temporary: str, path: str, inode: int) -> bool:
    try:
        disk.link(temporary, path)
    except OSError as error:
        try:
            links = _links(disk, temporary)
        except OSError as second:
            holder = _holder(disk, path) if second.errno in (errno.ENOENT, errno.ESTALE) else None
            if holder is not None:  # another process swept our temporary, as it does with temporaries of existing names
                return holder == inode
            raise Uncertain(f"cannot determine whether a name was created: {second}", where=path) from error
        if links == 2:
            return True
        if error.errno == errno.EEXIST:
            return False
        raise translate(error, "creating a file name", path) from error
    return True


def _links(disk: Disk, path: str) -> int:
    """Return a file's link count from the server. Opening asks the server, while ``lstat`` may return cached attributes."""
    fd = disk.open_read(path)
    try:
        return disk.fstat(fd).st_nlink
    finally:
        with contextlib.suppress(OSError):
            disk.close(fd)


def _holder(disk: Disk, path: str) -> int | None:
    """Return the inode that has the name; None if the name does not exist."""
    revalidate_directory(disk, os.path.dirname(path))
    try:
        return disk.lstat(path).st_ino
    except OSError:
        return None


def revalidate_directory(disk: Disk, directory: str) -> None:
    """Make a network file system's client check its cache of a directory's names; of the nearest existing parent if it is missing.

    A client caches for up to a minute that a name is missing. A name may count as missing only after this call. Cost: two system calls
    if the directory exists. Never raises.
    """
    while True:
        try:
            disk.revalidate(directory)
            return
        except OSError as error:
            if error.errno not in (errno.ENOENT, errno.ESTALE) or directory == os.path.dirname(directory):
                return
            directory = os.path.dirname(directory)


def temporary_of(name: str) -> str | None:
    """Return the target name of a temporary file of ``create_once``; None for other names."""
    match = _TEMPORARY.match(name)
    return match[1] if match else None


class OpenFile:
    """A regular file of the store, open for reading. Files of ``direct_from`` bytes or more bypass the page cache, where possible.

    A handle that the server no longer knows is reopened once, if the name still refers to the same file.
    """

    def __init__(self, disk: Disk, path: str, *, direct_from: int | None = None) -> None:
        self._disk, self._path = disk, path
        self._direct = -1
        self._given_up: list[int] = []
        """Stale descriptors, which another thread may still use. Closed by ``close``."""
        self._windows: dict[int, bytes] = {}
        self._lock = threading.Lock()
        try:
            self._fd = disk.open_read(path)
        except OSError as error:
            raise translate(error, "opening a file", path) from error
        try:
            status = disk.fstat(self._fd)
        except OSError as error:
            self.close()
            raise translate(error, "reading the attributes of a file", path) from error
        if not stat.S_ISREG(status.st_mode):
            self.close()
            raise UnsafeContent("not a regular file", where=path)
        self.size = status.st_size
        self._identity = (status.st_dev, status.st_ino, status.st_size)
        if direct_from is not None and self.size >= direct_from:
            # no direct I/O on this file system, or no /proc: read through the page cache
            with contextlib.suppress(OSError):
                self._direct = disk.reopen_direct(self._fd)

    def map(self) -> mmap.mmap:
        """Return a private mapping of the file. Pages are read when first touched, and writes stay in this process.

        The mapping stays valid after ``close``. Raise ``StoreUnavailable`` if the system refuses it.
        """
        try:
            return mmap.mmap(self._fd, self.size, access=mmap.ACCESS_COPY)
        except OSError as error:
            raise translate(error, "mapping a file into memory", self._path) from error

    def fetch(self, offset: int, length: int, room: memoryview) -> memoryview | None:
        """See ``Reader``."""
        if self._direct < 0 or self._cached(offset, length):
            return None
        begin = offset - offset % ALIGN
        end = -(-(offset + length) // ALIGN) * ALIGN
        needed, got = offset + length - begin, 0
        try:
            while got < needed and got % ALIGN == 0:
                read = self._read(True, room[got : end - begin], begin + got)
                if read <= 0:
                    raise CorruptCheckpoint(f"the file ends at byte {begin + got}, and is truncated", where=self._path)
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
            return True  # read_into raises the error
        while length:
            window, within = divmod(offset, _WINDOW)
            step = min(length, _WINDOW - within)
            if self._window(window).find(0, within // mmap.PAGESIZE, -(-(within + step) // mmap.PAGESIZE)) >= 0:
                return False
            offset, length = offset + step, length - step
        return True

    def _window(self, number: int) -> bytes:
        """Return which pages of a window were cached at the first call. The system call takes the lock of page faults and reads."""
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
                got = self._read(False, into, offset)
                if got <= 0:
                    raise CorruptCheckpoint(f"the file ends at byte {offset}, and is truncated", where=self._path)
                into, offset = into[got:], offset + got
        except OSError as error:
            raise translate(error, f"reading at byte {offset}", self._path) from error

    def _read(self, direct: bool, into: memoryview, offset: int) -> int:
        fd = self._direct if direct else self._fd
        if not direct or fd >= 0:  # below 0: another thread has reopened the file since the caller's check
            try:
                return self._disk.preadv(fd, into, offset)
            except OSError as error:
                if error.errno not in STALE_ERRORS or fd < 0:
                    raise
                self._reopen(fd, error)
        if direct:
            # the caller then reads through the page cache
            raise OSError(errno.EINVAL, "through the cache from here on")
        return self._disk.preadv(self._fd, into, offset)

    def _reopen(self, stale: int, error: OSError) -> None:
        """Replace a descriptor that the server no longer knows. Raise ``StaleHandle`` if the name refers to another file now."""
        with self._lock:
            if stale not in (self._fd, self._direct):
                return  # another thread was first
            revalidate_directory(self._disk, os.path.dirname(self._path))
            fd = -1
            try:
                fd = self._disk.open_read(self._path)
                status = self._disk.fstat(fd)
                same = (status.st_dev, status.st_ino, status.st_size) == self._identity
                why = "another file has its name now"
            except OSError as second:
                same, why = False, f"reopening it failed: {errno.errorcode.get(second.errno or 0, str(second))}"
            if not same:
                if fd >= 0:
                    with contextlib.suppress(OSError):
                        self._disk.close(fd)
                raise StaleHandle(
                    f"the file is gone from the server while it is read here, and {why}",
                    where=self._path,
                    hint="it was deleted or replaced on another machine: select the checkpoint again",
                ) from error
            self._given_up += [descriptor for descriptor in (self._fd, self._direct) if descriptor >= 0]
            self._fd, self._direct = fd, -1

    def close(self) -> None:
        """Close all descriptors. Errors are ignored: nothing was written. Idempotent: a closed number may be another file's by then."""
        descriptors = (self._fd, self._direct, *self._given_up)
        self._fd, self._direct, self._given_up = -1, -1, []
        for fd in descriptors:
            if fd >= 0:
                with contextlib.suppress(OSError):
                    self._disk.close(fd)
        self._given_up.clear()
