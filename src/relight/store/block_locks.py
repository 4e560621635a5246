"""Locks of blocks between the processes that share a cache, so that one process fetches a block and the others wait for it.

The locks are byte ranges of one empty file (``F_OFD_SETLK``). The kernel releases them when the process ends, however it ends.
They save requests and decide nothing: where no lock is available, each process fetches the block itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import struct
import time
from collections.abc import Iterator

from relight.format import digest

LOCK_FILE = "locks"
"""File in the cache's directory. It stays empty."""
WAIT_S = 30.0
"""The longest wait for another process, in seconds. It may be stopped, or its server may not answer."""
_POLL_S = 0.01
_FLOCK = struct.Struct("@hhqqi4x")
"""``struct flock``: type, whence, start, length, process (0)."""


@contextlib.contextmanager
def block_lock(folder: str, block: str) -> Iterator[None]:
    """Hold the lock of ``block`` in the cache at ``folder``, if it is available within ``WAIT_S``.

    Threads of one process exclude each other, too. Each call opens the file: a forked child shares no lock that is taken later,
    and one that it does share ends with this process's.
    """
    try:
        fd = os.open(
            os.path.join(folder, LOCK_FILE),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK,
            0o600,
        )
    except OSError:
        yield
        return
    start = int.from_bytes(digest(block.encode())[:8], "big") >> 2
    wanted, released = (_FLOCK.pack(kind, os.SEEK_SET, start, 1, 0) for kind in (fcntl.F_WRLCK, fcntl.F_UNLCK))
    try:
        ends = time.monotonic() + WAIT_S
        while not _is_locked(fd, wanted) and time.monotonic() < ends:
            time.sleep(_POLL_S)
        yield
    finally:
        with contextlib.suppress(OSError):
            fcntl.fcntl(fd, fcntl.F_OFD_SETLK, released)  # closing is not enough while a forked child has the file open
        os.close(fd)


def _is_locked(fd: int, wanted: bytes) -> bool:
    """Try to lock. Return False if another process has the lock; True also if this file system has no locks."""
    try:
        fcntl.fcntl(fd, fcntl.F_OFD_SETLK, wanted)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True
