"""A limit on bytes per second that all processes of a node share, for one purpose such as the saves of a run.

The processes share eight bytes of a file in this user's private directory: the time at which the next bytes may move.
Each process adds the time of its bytes there, under a lock. If a process dies, its lock is released, and the others
wait at most a tenth of a second for its last piece.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import struct
import threading
import time

from relight.comm.local_sockets import LocalDirectory
from relight.comm.node import this_node

FILE = "paces"
SLOTS = 4096
"""Number of purposes that the file distinguishes. Two purposes in one slot share their limit, which is slower but
harmless."""
PIECE_S = 0.1
"""Seconds that one piece takes at the limit: short, so that the rate is even."""
PIECE_BYTES_MIN = 64 << 10
AHEAD_MAX_S = 3600.0
"""A time further ahead than this is ignored: the file is damaged, or from another boot."""
_TIME = struct.Struct("<d")


class NodePace:
    """A limit of ``bytes_per_second`` for all processes of this node that pass the same ``purpose``. Thread-safe.

    Without a private directory the limit holds for this process alone. Cost: a lock and two small reads and writes a
    piece.
    """

    _fd: int | None = None

    def __init__(self, bytes_per_second: float, purpose: str) -> None:
        self.bytes_per_second = bytes_per_second
        slot = int.from_bytes(hashlib.sha256(this_node() + purpose.encode()).digest()[:4], "big") % SLOTS
        self._at, self._lock, self._own = slot * _TIME.size, threading.Lock(), 0.0
        self._owner = os.getpid()
        with contextlib.suppress(OSError), LocalDirectory() as directory:
            self._fd = os.open(FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600, dir_fd=directory.fd)

    def __del__(self) -> None:
        fd, self._fd = self._fd, None
        if fd is not None:
            with contextlib.suppress(OSError):
                os.close(fd)

    @property
    def piece_bytes(self) -> int:
        """Bytes to move at once."""
        return max(PIECE_BYTES_MIN, int(self.bytes_per_second * PIECE_S) // 4096 * 4096)

    def spend(self, length: int) -> None:
        """Wait until ``length`` more bytes may be moved."""
        time.sleep(max(0.0, self._reserve(length / self.bytes_per_second)))

    def spent(self, length: int) -> None:
        """Wait for the time that ``length`` bytes take, which were moved at once just now."""
        seconds = length / self.bytes_per_second
        time.sleep(max(0.0, self._reserve(seconds) + seconds))

    def _reserve(self, seconds: float) -> float:
        """Reserve the node's next ``seconds``. Return the seconds until they begin."""
        with self._lock:
            try:
                return self._reserve_in_file(seconds)
            except OSError:  # the file system is gone or full: limit this process alone
                begins = max(self._own, time.monotonic())
                self._own = begins + seconds
                return begins - time.monotonic()

    def _reserve_in_file(self, seconds: float) -> float:
        if self._fd is None:
            raise OSError("no private directory")
        fcntl.flock(self._fd, fcntl.LOCK_EX)
        try:
            stored, now = os.pread(self._fd, _TIME.size, self._at), time.monotonic()
            then = _TIME.unpack(stored)[0] if len(stored) == _TIME.size else now
            begins = then if now <= then <= now + AHEAD_MAX_S else now
            os.pwrite(self._fd, _TIME.pack(begins + seconds), self._at)
        finally:
            fcntl.flock(self._fd, fcntl.LOCK_UN)
        return begins - now
