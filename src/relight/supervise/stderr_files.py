"""The copies of the ranks' stderr, which torch prints while they grow. Only their ends are evidence of a failure."""

from __future__ import annotations

import contextlib
import ctypes
import os
from collections.abc import Iterable

EVERY_S = 10.0
"""Seconds between two calls of ``release_printed``."""
KEPT_BYTES = 1 << 20
"""Bytes before torch's position that stay: it has read ahead, and an incident has the last lines."""
_KEEP_SIZE_AND_PUNCH_HOLE = 3


def release_printed(paths: Iterable[str]) -> None:
    """Free the disk space of what torch has printed from these files, except for the last ``KEPT_BYTES``.

    The ranks continue to write at the same position. Otherwise the progress bars of some weeks fill the disk, and each rank fails at its
    next line. Does nothing on a file system without holes, without ``/proc``, and while the system refuses descriptors or memory.
    """
    try:
        positions = _positions()
    except (OSError, MemoryError):  # the next call does it
        return
    for path in paths:
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CLOEXEC)
            try:
                status = os.fstat(descriptor)
                length = positions.get((status.st_dev, status.st_ino), 0) - KEPT_BYTES
                if length > 0 and 512 * status.st_blocks > 2 * KEPT_BYTES:
                    ctypes.CDLL(None).fallocate(
                        descriptor, _KEEP_SIZE_AND_PUNCH_HOLE, ctypes.c_int64(0), ctypes.c_int64(length)
                    )
            finally:
                os.close(descriptor)


def _positions() -> dict[tuple[int, int], int]:
    """Return the lowest position at which this process reads each file, by device and inode."""
    positions: dict[tuple[int, int], int] = {}
    for number in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError, ValueError):
            status = os.stat(f"/proc/self/fd/{number}")
            with open(f"/proc/self/fdinfo/{number}", encoding="ascii") as file:
                position = int(file.readline().split()[1])
            file_id = status.st_dev, status.st_ino
            positions[file_id] = min(position, positions.get(file_id, position))
    return positions
