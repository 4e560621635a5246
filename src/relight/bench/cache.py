"""The files below a folder, and whether they are in the page cache."""

from __future__ import annotations

import mmap
import os
from collections.abc import Iterator
from pathlib import Path

from relight.store import Disk

_WINDOW = 256 << 20
assert _WINDOW % mmap.ALLOCATIONGRANULARITY == 0


def files(folder: Path) -> Iterator[Path]:
    """Return every regular file, sorted by name."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def drop_cache(folder: Path) -> None:
    """Ask the kernel to drop the files' pages. It drops only clean ones, hence the fsync; a file system may refuse."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def read_through(folder: Path) -> None:
    """Read every byte once, so that all files are in the page cache."""
    buffer = bytearray(4 << 20)
    for path in files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident(folder: Path) -> float:
    """Return the fraction of the files' pages that is in the page cache, from 0 to 1."""
    disk = Disk()
    pages = inside = 0
    for path in files(folder):
        fd = disk.open_read(str(path))
        try:
            size = disk.fstat(fd).st_size
            for begin in range(0, size, _WINDOW):
                in_cache = disk.resident(fd, begin, min(_WINDOW, size - begin))
                pages += len(in_cache)
                inside += sum(in_cache)
        finally:
            disk.close(fd)
    return inside / pages if pages else 0.0
