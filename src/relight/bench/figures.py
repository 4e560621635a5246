"""What was measured, as numbers: medians of rounds, and ratios to the floor of the same round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

FLOORS = {
    "memcpy_1": "copy, 1 thread",
    "memcpy": "copy, {threads}",
    "hash_1": "hash, 1 thread",
    "hash": "hash, {threads}",
    "write_direct": "write, direct",
    "write_buffered": "write, buffered",
    "read_cold": "read, cold",
    "read_cached": "read, cached",
}
"""Every floor and what it is called. ``{threads}``: how many are useful. Direct is past the page cache; the hash is BLAKE3."""
OURS = {
    "save_waiting": ("save that waits", ("write",)),
    "save_blocked": ("background: step() returns", ("memcpy",)),
    "save_durable": ("background: durable", ("write",)),
    "save_lost": ("background: training loses", ("memcpy", "hash")),
    "restore_cold": ("restore, cold", ("read_cold",)),
    "restore_warm": ("restore, warm", ("read_cached", "hash")),
    "restore_memory": ("restore, from memory", ("memcpy", "hash")),
}
"""What Relight does, what it is called, and the floors that it is held against: their sum, where there are two.

Saves are timed until they are durable, restores until all is verified. What training loses is measured with work on all cores.
"""
_NAMES = {"memcpy": "copy", "memcpy_1": "copy", "hash": "hash", "hash_1": "hash"}
NOISY = 2.0
"""Floors whose slowest round took so many times the fastest are told of."""


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing measured. ``seconds`` is the median of ``rounds``; ``ratio`` that of the rounds' ratios to ``floor``."""

    name: str
    label: str
    seconds: float
    bytes: int
    rounds: tuple[float, ...]
    floor: tuple[str, ...] = ()
    ratio: float | None = None

    @property
    def against(self) -> str:
        """The floor for people: ``copy + hash``."""
        return " + ".join(_NAMES.get(name, FLOORS[name]) for name in self.floor)

    @property
    def bytes_per_second(self) -> float:
        """Of the median."""
        return self.bytes / self.seconds if self.seconds else 0.0


Rounds = Sequence[Mapping[str, float]]
"""Seconds by name, round by round."""


def floor_figures(rounds: Rounds, size: int, threads: Mapping[str, int]) -> list[Figure]:
    """The floors that were measured, in order. ``threads``: how many were useful, for those with several."""
    found = []
    for name, label in FLOORS.items():
        if values := _values(rounds, name):
            count = threads.get(name, 1)
            text = label.format(threads=f"{count} thread{'' if count == 1 else 's'}")
            found.append(Figure(name, text, statistics.median(values), size, tuple(values)))
    return found


def our_figures(rounds: Rounds, size: int, write: str) -> list[Figure]:
    """What Relight did. ``write`` names the floor of writing that counts."""
    found = []
    for name, (label, against) in OURS.items():
        floor = tuple(write if one == "write" else one for one in against)
        values = _values(rounds, name)
        if not values:
            continue
        ratios = [row[name] / sum(row[one] for one in floor) for row in rounds if name in row and all(row.get(one) for one in floor)]
        ratio = statistics.median(ratios) if ratios else None
        found.append(Figure(name, label, statistics.median(values), size, tuple(values), floor, ratio))
    return found


def medians(rounds: Rounds) -> dict[str, float]:
    """Of everything, by name."""
    return {name: statistics.median(_values(rounds, name)) for name in dict.fromkeys(name for row in rounds for name in row)}


def noise(floors: Sequence[Figure]) -> list[str]:
    """A sentence if there are floors that were not the same from round to round: what rests on them should be measured again."""
    uneven = {
        one.label: f"{one.label}: {min(one.rounds):.2g} to {max(one.rounds):.2g} s"
        for one in floors
        if min(one.rounds) > 0 and max(one.rounds) / min(one.rounds) >= NOISY
    }
    if not uneven:
        return []
    return [f"something else used machine or disk, the floors were uneven: trust the ratios more ({'; '.join(uneven.values())})"]


def useful(seconds: Mapping[int, float], gain: float = 0.05) -> int:
    """The fewest threads that take at most ``gain`` longer than the fastest number of them."""
    best = min(seconds.values())
    return min(count for count, value in seconds.items() if value <= best * (1 + gain))


def thread_counts(cores: int, most: int = 16) -> list[int]:
    """1, 2, 4, … up to the cores.

    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    top = max(1, min(cores, most))
    return sorted({top, *(1 << power for power in range(top.bit_length()) if 1 << power <= top)})


def _values(rounds: Rounds, name: str) -> list[float]:
    return [row[name] for row in rounds if name in row]
