"""What the machine itself needs for the same bytes: no checkpoint can take less.

Plain actions, to be timed by the caller. Buffers are made beforehand where they are large; torch and numpy are not needed.
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
"""What one call writes, and how much of what is written is random."""
READ_BYTES = 4 << 20
PIECE_BYTES = 16 << 20
"""What is copied at once: a tensor of a few million numbers."""


def timed(action: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def random_bytes(size: int) -> memoryview:
    """Page-aligned memory without patterns that a file system could compress: a random block, again and again. In huge pages, if it can."""
    return _filled(page_buffer(size))


def bytes_as_tensors_lie(size: int) -> memoryview:
    """The same in ordinary pages, as most allocators of tensors have them: what is saved comes out of such, what is loaded goes there."""
    return _filled(memoryview(mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)))


def _filled(memory: memoryview) -> memoryview:
    size = len(memory)
    block = os.urandom(min(size, BLOCK_BYTES))
    for at in range(0, size, BLOCK_BYTES):
        memory[at : at + BLOCK_BYTES] = block[: size - at]
    return memory


def copy(target: memoryview, source: memoryview, threads: int = 1) -> None:
    """Copy all of ``source`` in pieces of ``PIECE_BYTES``, the threads in turns.

    In pieces, as a state is copied tensor by tensor: what is longer than most of the processor's shared cache, libc copies around the
    caches, at twice the speed.
    """

    def every(first: int) -> None:
        for at in range(first * PIECE_BYTES, len(source), threads * PIECE_BYTES):
            copy_bytes(source[at : at + PIECE_BYTES], target[at : at + PIECE_BYTES])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(every, range(threads)))


def hash_bytes(source: memoryview, threads: int = 1) -> None:
    """BLAKE3 of all of ``source``."""
    Digest(source, max_threads=threads).digest()


def write(path: Path, block: memoryview, size: int, *, direct: bool) -> None:
    """A new file of ``size`` bytes, made of ``block`` again and again: preallocated, fsync of file and directory included.

    ``direct``: past the page cache; the size is then rounded up to whole pages. A block as large as what a save writes is a floor for it:
    out of a few megabytes, which are in some cache by then, the same takes a tenth less.
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
        at = 0
        while at < size:
            within = at % len(block)
            at += os.pwrite(fd, block[within : within + min(BLOCK_BYTES, size - at)], at)
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
    """Read ``size`` bytes, the threads in turns, and hand each piece to ``then``. ``into``: memory for all of it, page-aligned; without
    it each thread reads into the same few megabytes again and again."""
    fd = os.open(path, os.O_RDONLY | (O_DIRECT if direct else 0))

    def every(first: int) -> None:
        room = page_buffer(READ_BYTES)
        for at in range(first * READ_BYTES, size, threads * READ_BYTES):
            there = room if into is None else into[at : at + READ_BYTES]
            got = os.preadv(fd, [there], at)
            if then is not None:
                then(there[:got])

    try:
        with ThreadPoolExecutor(threads) as pool:
            list(pool.map(every, range(threads)))
    finally:
        os.close(fd)


def direct_works(folder: Path) -> bool:
    """Whether files in ``folder`` can be written and read past the page cache."""
    path, room = folder / "direct", page_buffer(PAGE)
    try:
        write(path, room, PAGE, direct=True)
        read(path, PAGE, direct=True)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            path.unlink()
    return bool(O_DIRECT)
