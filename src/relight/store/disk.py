"""The system calls of a local store, one method each: the seam where tests kill, fail and simulate.

Nothing here decides anything. ``relight.testing`` has disks that crash at the nth call, fail it, or forget what was not fsynced.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Iterator

O_DIRECT = getattr(os, "O_DIRECT", 0)
_LOWEST_BIT = bytes(value & 1 for value in range(256))

_libc = ctypes.CDLL(None, use_errno=True)
_mincore = _libc.mincore
_mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
_fallocate = getattr(_libc, "fallocate64", None) or getattr(_libc, "fallocate", None)
if _fallocate is not None:
    _fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class Disk:
    """System calls as they are. Paths are absolute. Errors are ``OSError``."""

    def open_new(self, path: str, *, direct: bool = False) -> int:
        """Create a file exclusively, for writing."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (O_DIRECT if direct else 0), 0o666)

    def open_read(self, path: str) -> int:
        """Open for reading; a symbolic link is an error, a FIFO does not block."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def reopen_direct(self, fd: int) -> int:
        """The file of ``fd`` once more, for reading past the page cache."""
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)

    def open_dir(self, path: str) -> int:
        """Open a directory, to fsync it."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def revalidate(self, path: str) -> None:
        """Open a directory and close it: a network file system's client then asks the server whether what it remembers of it still holds,
        names that were not there too (close-to-open consistency: nfs(5))."""
        os.close(self.open_dir(path))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of ``data``; how much."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read some; how much, 0 at the end."""
        return os.preadv(fd, [into], offset)

    def resident(self, fd: int, offset: int, length: int) -> bytes:
        """For each page of a range within the file, which begins with one, whether it is in the page cache: 1 or 0."""
        with mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, offset=offset) as mapped:
            found = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            held = ctypes.c_ubyte.from_buffer(mapped)
            done = _mincore(ctypes.addressof(held), length, found)
            del held  # a mapping that is pointed to cannot be closed
        if done:
            raise OSError(ctypes.get_errno(), "mincore")
        return bytes(found).translate(_LOWEST_BIT)

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve room, so that a full disk is noticed before any byte is written. ``EOPNOTSUPP`` where the file system cannot.

        Not ``posix_fallocate``: where the file system cannot, the C library reads and writes a byte of each page, which a file that is only
        open for writing does not allow (``EBADF``: NFS before 4.2), and which would cost as much as writing it all.
        """
        if _fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _fallocate(fd, 0, 0, size):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, size: int) -> None:
        """Cut to length."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Make a file's bytes, or a directory's names, durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close; delayed write errors may come here."""
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fails if the name is taken. The commit primitive."""
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Give a file another's name, which that one loses. For what means the same alone: see ``Rewrites``."""
        os.replace(source, target)

    def unlink(self, path: str) -> None:
        """Remove a name."""
        os.unlink(path)

    def mkdir(self, path: str) -> None:
        """Make a directory."""
        os.mkdir(path, 0o777)

    def rmdir(self, path: str) -> None:
        """Remove an empty directory."""
        os.rmdir(path)

    def fstat(self, fd: int) -> os.stat_result:
        """What an open file is."""
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        """What a name is, without following links."""
        return os.lstat(path)

    def scan(self, path: str) -> Iterator[tuple[str, bool]]:
        """Names in a directory, and whether each is a directory (links are not)."""
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir(follow_symlinks=False)

    def free_bytes(self, path: str) -> int:
        """Room left for an ordinary user."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize
