"""Measured figures: medians of rounds, and ratios to the floor of the same round. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from relight.units import count_text, duration_text

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
"""Label of each floor. ``{threads}``: number of useful threads. Direct: without the page cache. The hash is BLAKE3."""
OURS = {
    "save_waiting": ("save that waits", ("write",)),
    "save_blocked": ("background: step() returns", ("memcpy",)),
    "save_durable": ("background: durable", ("write",)),
    "save_lost": ("background: training loses", ("memcpy", "hash")),
    "restore_cold": ("restore, cold", ("read_cold",)),
    "restore_warm": ("restore, warm", ("read_cached", "hash")),
    "restore_memory": ("restore, from memory", ("memcpy", "hash")),
}
"""Label of each measured operation of Relight, and the floors that it is compared with: their sum if there are two.

Saves are timed until they are durable, restores until all is verified. Lost training time is measured with work on all cores.
"""
_NAMES = {"memcpy": "copy", "memcpy_1": "copy", "hash": "hash", "hash_1": "hash"}
NOISY = 2.0
"""Ratio of the slowest to the fastest round above which a floor is reported as uneven."""


@dataclass(frozen=True, slots=True)
class Figure:
    """A measured figure. ``seconds``: the median of ``rounds``. ``ratio``: the median of the rounds' ratios to ``floor``."""

    name: str
    label: str
    seconds: float
    bytes: int
    rounds: tuple[float, ...]
    floor: tuple[str, ...] = ()
    ratio: float | None = None

    @property
    def against(self) -> str:
        """Label of the floor, such as ``copy + hash``."""
        return " + ".join(_NAMES.get(name, FLOORS[name]) for name in self.floor)

    @property
    def bytes_per_second(self) -> float:
        """Bytes per second of the median."""
        return self.bytes / self.seconds if self.seconds else 0.0


Rounds = Sequence[Mapping[str, float]]
"""Seconds by name, round by round."""


def floor_figures(rounds: Rounds, size: int, threads: Mapping[str, int]) -> list[Figure]:
    """Return the measured floors, in order. ``threads``: number of useful threads, for floors with several."""
    figures = []
    for name, label in FLOORS.items():
        if values := _values(rounds, name):
            count = threads.get(name, 1)
            text = label.format(threads=count_text(count, "thread"))
            figures.append(Figure(name, text, statistics.median(values), size, tuple(values)))
    return figures


def our_figures(rounds: Rounds, size: int, write: str) -> list[Figure]:
    """Return the measured operations of Relight. ``write``: name of the write floor to compare with."""
    figures = []
    for name, (label, against) in OURS.items():
        floor = tuple(write if part == "write" else part for part in against)
        values = _values(rounds, name)
        if not values:
            continue
        ratios = [
            row[name] / sum(row[part] for part in floor)
            for row in rounds
            if name in row and all(row.get(part) for part in floor)
        ]
        ratio = statistics.median(ratios) if ratios else None
        figures.append(Figure(name, label, statistics.median(values), size, tuple(values), floor, ratio))
    return figures


def medians(rounds: Rounds) -> dict[str, float]:
    """Return the median of each figure, by name."""
    return {
        name: statistics.median(_values(rounds, name)) for name in dict.fromkeys(name for row in rounds for name in row)
    }


def noise(floors: Sequence[Figure]) -> list[str]:
    """Return a note if a floor differed from round to round: the measurement should be repeated. Empty otherwise."""
    uneven = {
        floor.label: f"{floor.label}: {duration_text(min(floor.rounds))} to {duration_text(max(floor.rounds))}"
        for floor in floors
        if min(floor.rounds) > 0 and max(floor.rounds) / min(floor.rounds) >= NOISY
    }
    if not uneven:
        return []
    return [
        f"another process used the machine or disk, so the floors were uneven: rely on the ratios ({'; '.join(uneven.values())})"
    ]


def useful(seconds: Mapping[int, float], gain: float = 0.05) -> int:
    """Return the smallest number of threads that takes at most the fraction ``gain`` longer than the fastest."""
    best = min(seconds.values())
    return min(count for count, value in seconds.items() if value <= best * (1 + gain))


def thread_counts(cores: int, most: int = 16) -> list[int]:
    """Return 1, 2, 4, … up to the number of cores.

    >>> thread_counts(6)
    [1, 2, 4, 6]
    """
    top = max(1, min(cores, most))
    return sorted({top, *(1 << power for power in range(top.bit_length()) if 1 << power <= top)})


def _values(rounds: Rounds, name: str) -> list[float]:
    return [row[name] for row in rounds if name in row]
