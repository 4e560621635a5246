"""System calls of a local store, one method each. Tests replace this class to crash, fail and simulate disks.

No method has logic of its own. ``relight.testing`` has disks that crash at the nth call, fail it, or lose what was not fsynced.
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
    """Plain system calls. Paths are absolute. Errors are ``OSError``."""

    def open_new(self, path: str, *, direct: bool = False) -> int:
        """Create a file exclusively, for writing."""
        flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
        return os.open(path, flags | (O_DIRECT if direct else 0), 0o666)

    def open_read(self, path: str) -> int:
        """Open for reading; a symbolic link is an error, a FIFO does not block."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)

    def reopen_direct(self, fd: int) -> int:
        """Open the file of ``fd`` again, for direct I/O."""
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC | O_DIRECT)

    def open_dir(self, path: str) -> int:
        """Open a directory, to fsync it."""
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)

    def revalidate(self, path: str) -> None:
        """Open and close a directory. A network file system's client then revalidates its cache of the names, including missing ones
        (close-to-open consistency: nfs(5))."""
        os.close(self.open_dir(path))

    def pwrite(self, fd: int, data: memoryview, offset: int) -> int:
        """Write some of ``data``. Return the number of bytes written."""
        return os.pwrite(fd, data, offset)

    def preadv(self, fd: int, into: memoryview, offset: int) -> int:
        """Read some bytes. Return their number, 0 at the end of the file."""
        return os.preadv(fd, [into], offset)

    def resident(self, fd: int, offset: int, length: int) -> bytes:
        """Return for each page of a page-aligned range whether it is in the page cache: 1 or 0."""
        with mmap.mmap(fd, length, flags=mmap.MAP_PRIVATE, offset=offset) as mapped:
            pages = (ctypes.c_ubyte * -(-length // mmap.PAGESIZE))()
            first_byte = ctypes.c_ubyte.from_buffer(mapped)
            done = _mincore(ctypes.addressof(first_byte), length, pages)
            del first_byte  # a mapping with references cannot be closed
        if done:
            raise OSError(ctypes.get_errno(), "mincore")
        return bytes(pages).translate(_LOWEST_BIT)

    def fallocate(self, fd: int, size: int) -> None:
        """Reserve space, so that a full disk is an error before any byte is written. ``EOPNOTSUPP`` if the file system cannot.

        Not ``posix_fallocate``: without support of the file system, the C library reads and writes a byte of each page. That fails for a
        file that is only open for writing (``EBADF``: NFS before 4.2), and costs as much as writing the file.
        """
        if _fallocate is None:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        while _fallocate(fd, 0, 0, size):
            code = ctypes.get_errno()
            if code != errno.EINTR:
                raise OSError(code, os.strerror(code))

    def truncate(self, fd: int, size: int) -> None:
        """Truncate to ``size`` bytes."""
        os.ftruncate(fd, size)

    def fsync(self, fd: int) -> None:
        """Make a file's bytes, or a directory's names, durable."""
        os.fsync(fd)

    def close(self, fd: int) -> None:
        """Close. May raise delayed write errors."""
        os.close(fd)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name; fails if the name is taken. The commit primitive."""
        os.link(source, target)

    def replace(self, source: str, target: str) -> None:
        """Rename over an existing file. Only for equivalent contents: see ``Rewrites``."""
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
        """Return the status of an open file."""
        return os.fstat(fd)

    def lstat(self, path: str) -> os.stat_result:
        """Return the status of a name, without following links."""
        return os.lstat(path)

    def scan(self, path: str) -> Iterator[tuple[str, bool]]:
        """Yield the names in a directory, and whether each is a directory (links are not)."""
        with os.scandir(path) as entries:
            for entry in entries:
                yield entry.name, entry.is_dir(follow_symlinks=False)

    def free_bytes(self, path: str) -> int:
        """Return the bytes that are free for an ordinary user."""
        stat = os.statvfs(path)
        return stat.f_bavail * stat.f_frsize
