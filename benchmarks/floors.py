"""What the machine itself needs for the same bytes: no checkpoint can take less."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
from blake3 import blake3

from benchmarks.files import drop_cache, read_through
from benchmarks.workloads import state_bytes

NAME = "floors"
BLOCK = 16 << 20
MEMORY_MAX = 1 << 30
"""Floors of memory are measured on at most this much, and scaled."""


def measure(folder: Path, workload: str) -> dict[str, float]:
    """Seconds for the workload's bytes."""
    size = state_bytes(workload)
    part = min(size, MEMORY_MAX)
    source = np.random.default_rng(0).integers(0, 256, part, dtype=np.uint8)
    target = source.copy()
    found = {"state_bytes": float(size)}
    for threads in (1, 2):
        found[f"memcpy_{threads}"] = _best(partial(_copy, target, source, threads)) * size / part
        found[f"blake3_{threads}"] = _best(partial(blake3, source, max_threads=threads)) * size / part
    target = np.empty(0, dtype=np.uint8)
    path = folder / "floor"
    cpu = time.process_time()
    times = max(1, min(3, 3 * 10**9 // size))
    found["direct_write"] = min(_timed(partial(_write, path, source, size)) for _ in range(times))
    found["direct_write_cpu"] = (time.process_time() - cpu) / times
    found["cold_read"] = min(
        _cold(path, size, threads, direct) for _ in range(times) for threads, direct in ((1, True), (2, True), (4, False))
    )
    read_through(folder)
    for threads in (1, 2):
        found[f"cached_read_blake3_{threads}"] = _best(partial(_read_hashing, path, size, threads))
    path.unlink()
    found["core_seconds"] = found["memcpy_1"] + found["blake3_1"] + found["direct_write_cpu"]
    return found


def _timed(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def _best(action: Callable[[], object]) -> float:
    action()
    return min(_timed(action) for _ in range(3))


def _copy(target: np.ndarray, source: np.ndarray, threads: int) -> None:
    """NumPy copies without the GIL."""
    cuts = [len(source) * part // threads for part in range(threads + 1)]
    if threads == 1:
        np.copyto(target, source)
        return
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(lambda a, b: np.copyto(target[a:b], source[a:b]), cuts, cuts[1:]))


def _write(path: Path, source: np.ndarray, size: int) -> None:
    """Preallocated, past the page cache, fsync of file and directory included."""
    block = mmap.mmap(-1, BLOCK)
    block[:] = source[:BLOCK].tobytes().ljust(BLOCK, b"\1")
    padded = -(-size // 4096) * 4096
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_DIRECT", 0))
    os.posix_fallocate(fd, 0, padded)
    for at in range(0, padded, BLOCK):
        os.pwrite(fd, memoryview(block)[: min(BLOCK, padded - at)], at)
    os.fsync(fd)
    os.close(fd)
    directory = os.open(path.parent, os.O_RDONLY)
    os.fsync(directory)
    os.close(directory)


def _cold(path: Path, size: int, threads: int, direct: bool) -> float:
    drop_cache(path.parent)
    return _timed(partial(_read, path, size, threads, direct))


def _read(path: Path, size: int, threads: int, direct: bool) -> None:
    fd = os.open(path, os.O_RDONLY | (getattr(os, "O_DIRECT", 0) if direct else 0))

    def every(first: int) -> None:
        block = mmap.mmap(-1, BLOCK)
        for at in range(first * BLOCK, size, threads * BLOCK):
            os.preadv(fd, [block], at)

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(every, range(threads)))
    os.close(fd)


def _read_hashing(path: Path, size: int, threads: int) -> None:
    fd = os.open(path, os.O_RDONLY)

    def every(first: int) -> None:
        block = bytearray(4 << 20)
        for at in range(first * len(block), size, threads * len(block)):
            got = os.preadv(fd, [block], at)
            blake3(memoryview(block)[:got])

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(every, range(threads)))
    os.close(fd)
