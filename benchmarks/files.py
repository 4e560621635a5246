"""What is below a folder: its size, and whether it is in the page cache."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Iterator
from pathlib import Path


def files(folder: Path) -> Iterator[Path]:
    """Every file."""
    return (path for path in sorted(folder.rglob("*")) if path.is_file() and not path.is_symlink())


def allocated(folder: Path) -> int:
    """Bytes of the blocks that the files take."""
    return sum(path.stat().st_blocks * 512 for path in files(folder))


def drop_cache(folder: Path) -> None:
    """Ask the kernel to forget the files' pages; only clean ones can be forgotten, so fsync first."""
    for path in files(folder):
        fd = os.open(path, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def read_through(folder: Path) -> None:
    """Read every byte once, so that all of it is in the page cache."""
    buffer = bytearray(4 << 20)
    for path in files(folder):
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def resident(folder: Path) -> float:
    """The part of the bytes that is in the page cache, as ``mincore`` tells."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = inside = 0
    for path in files(folder):
        size = path.stat().st_size
        if not size:
            continue
        with (
            open(path, "rb") as file,
            mmap.mmap(file.fileno(), size, prot=mmap.PROT_READ | mmap.PROT_WRITE, flags=mmap.MAP_PRIVATE) as area,
        ):
            count = -(-size // mmap.PAGESIZE)
            told = (ctypes.c_ubyte * count)()
            start = ctypes.c_char.from_buffer(area)
            failed = libc.mincore(ctypes.c_void_p(ctypes.addressof(start)), ctypes.c_size_t(size), told)
            del start
            if not failed:
                pages += count
                inside += sum(byte & 1 for byte in bytes(told))
    return inside / pages if pages else 0.0
