"""Size of the state to measure with. Pure. Space is checked before the first byte is written, and a refusal has numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from relight.errors import ConfigError, NoSpace
from relight.units import parse_size, size_text

SIZE_MIN = 1_000_000
SIZE_DEFAULT = 500_000_000
"""Largest default size in bytes; more adds no information."""
SIZE_ENOUGH = 16_000_000
"""Smallest default size in bytes, however slow the disk is."""
PART_MAX = 256_000_000
"""Most bytes with which operations in memory are measured; larger sizes are scaled."""
TARGET_S = 30.0
_DISK_SPARE, _MEMORY_SPARE = 64_000_000, 512_000_000
_MEMORY_PASSES_BPS = 2e9


@dataclass(frozen=True, slots=True)
class BenchSpace:
    """Available space in bytes. None: unknown, or unlimited. ``write_bps``: measured write speed of the disk in bytes per second."""

    disk_bytes: int | None
    memory_bytes: int | None
    write_bps: float = 1e9
    torch: bool = True


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """``size``: bytes of the state. ``part``: bytes for operations in memory, whole pages. ``asked``: whether the user gave the size."""

    size: int
    part: int
    rounds: int
    asked: bool


def plan_bench(room: BenchSpace, size: int | None, rounds: int, *, where: str = "") -> BenchPlan:
    """Return the size to measure with. The default size takes less than about a minute. Raise ``NoSpace`` for a size that does not fit."""
    if rounds < 1:
        raise ConfigError(f"rounds must be a whole number from 1 on, not {rounds}")
    if size is not None and size < SIZE_MIN:
        raise ConfigError(
            f"a state of {size_text(size)} is too small to measure: --size must be at least {size_text(SIZE_MIN)}"
        )
    target = size or min(SIZE_DEFAULT, max(SIZE_ENOUGH, int(TARGET_S / rounds / _seconds_a_byte(room.write_bps))))
    disk, memory = _fits_disk(room), _fits_memory(room)
    if size is None:
        target = _rounded(min(target, disk, memory))
    if target > disk or (target < SIZE_MIN and disk <= memory):
        needed = disk_needed(max(target, SIZE_MIN))
        raise NoSpace(
            f"measuring with {size_text(max(target, SIZE_MIN))} needs {size_text(needed)} on the disk; "
            f"{size_text(room.disk_bytes or 0)} are free",
            where=where,
            hint=_smaller(min(disk, memory)) or "make room, or name a store on another disk",
        )
    if target > memory or target < SIZE_MIN:
        needed = memory_needed(max(target, SIZE_MIN), torch=room.torch)
        parts = "the state, two snapshots of it, buffers" if room.torch else "buffers"
        raise NoSpace(
            f"measuring with {size_text(max(target, SIZE_MIN))} needs {size_text(needed)} of memory ({parts}); "
            f"{size_text(room.memory_bytes or 0)} are available",
            where="memory",
            hint=_smaller(min(disk, memory)) or "end other programs",
        )
    return BenchPlan(target, -(-min(target, PART_MAX) // 4096) * 4096, rounds, size is not None)


def disk_needed(size: int) -> int:
    """Return the bytes needed on disk: one checkpoint is stored while another is being written."""
    return 2 * size + _DISK_SPARE


def memory_needed(size: int, *, torch: bool) -> int:
    """Return the bytes needed in memory: the state and two slots, two buffers, and what Python, torch and the agent take."""
    return (3 * size if torch else 0) + 2 * min(size, PART_MAX) + _MEMORY_SPARE


def spread(size: int, tensors: int | None) -> list[int]:
    """Return the number of elements of each parameter. With AdamW's two moments, all take about ``size`` bytes.

    With ``tensors``, parameters of equal size; else sizes like those of a GPT with 12 blocks.

    >>> spread(12_000, 6)
    [500, 500]
    """
    total = max(size // 12, 1)
    if tensors is not None:
        count = min(max(1, -(-tensors // 3)), total)
        return [total // count] * count
    width = max(1, math.isqrt(total // 200))
    block = [
        width,
        width,
        3 * width**2,
        3 * width,
        width**2,
        width,
        width,
        width,
        4 * width**2,
        4 * width,
        4 * width**2,
        width,
    ]
    sizes = [*block * 12, width, width]
    return [max(1, total - sum(sizes)), *sizes]


def state_size(text: str) -> int:
    """Return the bytes of ``--size``."""
    size = parse_size(text)
    if size is None:
        raise ConfigError(f"{text[:40]!r} is not a size", hint="such as 256MB, 1.5GB or 512MiB")
    return int(size)


def _seconds_a_byte(write_bps: float) -> float:
    """Return the seconds of one round per byte of state: about six writes and four reads on disk, and ten traversals of memory."""
    return 10 / max(write_bps, 1e6) + 10 / _MEMORY_PASSES_BPS


def _fits_disk(room: BenchSpace) -> int:
    return 1 << 62 if room.disk_bytes is None else max(0, (room.disk_bytes - _DISK_SPARE) // 2)


def _fits_memory(room: BenchSpace) -> int:
    if room.memory_bytes is None:
        return 1 << 62
    available = room.memory_bytes - _MEMORY_SPARE
    times = 5 if room.torch else 2
    if available < times * PART_MAX:
        return max(0, available // times)
    return (available - 2 * PART_MAX) // 3 if room.torch else 1 << 62


def _smaller(fits: int) -> str:
    return f"--size {_rounded(fits) // 10**6}MB fits" if _rounded(fits) >= SIZE_MIN else ""


def _rounded(size: int) -> int:
    """Return ``size`` rounded down to a multiple of 1 or 10 MB."""
    step = 10**7 if size >= 10**8 else 10**6
    return size // step * step
