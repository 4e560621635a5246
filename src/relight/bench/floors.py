"""Floors: what the machine itself needs for the same bytes. No checkpoint can take less.

The functions are timed by the caller. Large buffers are allocated beforehand. Needs neither torch nor numpy.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from relight.format import Digest
from relight.layout.sources import copy_bytes
from relight.store import PAGE, page_buffer
from relight.store.disk import O_DIRECT

BLOCK_BYTES = 16 << 20
"""Bytes that one call writes, and length of the random block that is repeated."""
READ_BYTES = 4 << 20
PIECE_BYTES = 16 << 20
"""Bytes copied at a time: like a tensor of a few million numbers."""


def timed(action: Callable[[], object]) -> float:
    """Return the seconds that ``action`` takes."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def random_bytes(size: int) -> memoryview:
    """Return page-aligned memory with a repeated random block, which file systems do not compress. In huge pages if possible."""
    return _filled(page_buffer(size))


def bytes_in_ordinary_pages(size: int) -> memoryview:
    """Return random bytes in ordinary pages, as most allocators of tensors use: saves read such memory, and restores write to it."""
    return _filled(memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


def _filled(memory: memoryview) -> memoryview:
    size = len(memory)
    block = os.urandom(min(size, BLOCK_BYTES))
    for offset in range(0, size, BLOCK_BYTES):
        memory[offset : offset + BLOCK_BYTES] = block[: size - offset]
    return memory


def copy(target: memoryview, source: memoryview, threads: int = 1) -> None:
    """Copy all of ``source`` in pieces of ``PIECE_BYTES``, divided among the threads.

    A state is also copied tensor by tensor. One copy of everything would be twice as fast: for lengths above most of the processor's
    shared cache, libc bypasses the caches.
    """

    def every(first: int) -> None:
        for offset in range(first * PIECE_BYTES, len(source), threads * PIECE_BYTES):
            copy_bytes(source[offset : offset + PIECE_BYTES], target[offset : offset + PIECE_BYTES])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(every, range(threads)))


def hash_bytes(source: memoryview, threads: int = 1) -> None:
    """Compute the BLAKE3 hash of all of ``source``."""
    Digest(source, max_threads=threads).digest()


def write(path: Path, block: memoryview, size: int, *, direct: bool) -> None:
    """Write a new file of ``size`` bytes with ``block`` repeated: preallocated, with fsync of file and directory.

    ``direct``: without the page cache; the size is then rounded up to whole pages. As a floor of a save, the block must be as large as the
    save: a block of a few megabytes stays in a processor cache, and the write takes a tenth less.
    """
    if direct:
        size, block = -(-size // PAGE) * PAGE, block[: len(block) // PAGE * PAGE]
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | (O_DIRECT if direct else 0), 0o666)
    try:
        try:
            os.posix_fallocate(fd, 0, size)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                raise
        offset = 0
        while offset < size:
            within = offset % len(block)
            offset += os.pwrite(fd, block[within : within + min(BLOCK_BYTES, size - offset)], offset)
        os.fsync(fd)
    finally:
        os.close(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def read(
    path: Path,
    size: int,
    threads: int = 1,
    *,
    direct: bool = False,
    into: memoryview | None = None,
    then: Callable[[memoryview], object] | None = None,
) -> None:
    """Read ``size`` bytes, divided among the threads, and pass each piece to ``then``. ``into``: page-aligned memory for all bytes; without
    it, each thread reuses a buffer of ``READ_BYTES``."""
    fd = os.open(path, os.O_RDONLY | (O_DIRECT if direct else 0))

    def every(first: int) -> None:
        buffer = page_buffer(READ_BYTES)
        for offset in range(first * READ_BYTES, size, threads * READ_BYTES):
            target = buffer if into is None else into[offset : offset + READ_BYTES]
            count = os.preadv(fd, [target], offset)
            if then is not None:
                then(target[:count])

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(every, range(threads)))
    finally:
        os.close(fd)


def direct_works(folder: Path) -> bool:
    """Return whether files in ``folder`` can be written and read with direct I/O."""
    path, buffer = folder / "direct", page_buffer(PAGE)
    try:
        write(path, buffer, PAGE, direct=True)
        read(path, PAGE, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return bool(O_DIRECT)
