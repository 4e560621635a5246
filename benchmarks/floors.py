"""What the machine itself usually needs for the same bytes. The actions are those of ``relight bench``.

Copies read from memory that is laid out like tensors, and cached reads go into such memory. Writes come from huge
pages, and are as large as a save.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median

from benchmarks.files import drop_cache, read_through
from benchmarks.workloads import state_bytes
from relight.bench import floors
from relight.bench.floors import timed
from relight.format import Digest

NAME = "floors"
TIMES_BELOW = 2 << 30
"""Below this size everything is measured three times and the median counts, as for the rivals."""
MEMORY_MAX = 1 << 30
"""Floors of memory are measured on at most this much, and scaled."""


def measure(folder: Path, workload: str) -> dict[str, float]:
    """Seconds for the workload's bytes."""
    size = state_bytes(workload)
    part = min(size, MEMORY_MAX)
    source, target = floors.bytes_in_ordinary_pages(part), floors.random_bytes(part)
    figures = {"state_bytes": float(size)}
    for threads in (1, 2):
        figures[f"memcpy_{threads}"] = _usual(partial(floors.copy, target, source, threads)) * size / part
        figures[f"blake3_{threads}"] = _usual(partial(floors.hash_bytes, source, threads)) * size / part
    del source
    path, direct = folder / "floor", floors.direct_works(folder)
    cpu = time.process_time()
    times = 3 if size < TIMES_BELOW else 1
    figures["direct_write"] = median(
        timed(partial(floors.write, path, target, size, direct=direct)) for _ in range(times)
    )
    figures["direct_write_cpu"] = (time.process_time() - cpu) / times
    ways = ((1, direct), (2, direct), (4, False))
    figures["cold_read"] = min(median(_cold(path, size, *way) for _ in range(times)) for way in ways)
    read_through(folder)
    into = floors.bytes_in_ordinary_pages(size)
    for threads in (1, 2):
        figures[f"cached_read_blake3_{threads}"] = _usual(
            partial(floors.read, path, size, threads, into=into, then=_hash)
        )
    path.unlink()
    figures["core_seconds"] = figures["memcpy_1"] + figures["blake3_1"] + figures["direct_write_cpu"]
    return figures


def _usual(action: Callable[[], object]) -> float:
    action()
    return median(timed(action) for _ in range(3))


def _cold(path: Path, size: int, threads: int, direct: bool) -> float:
    drop_cache(path.parent)
    return timed(partial(floors.read, path, size, threads, direct=direct))


def _hash(data: memoryview) -> None:
    Digest(data)
