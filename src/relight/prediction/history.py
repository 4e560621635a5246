"""Labelled history: recordings and made-up runs, cut into runs, each of which belongs as a whole to training, validation, or neither.

By run, never by window: windows of one run are alike, and a detector that was trained on some of them knows the others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np

from relight.prediction.features import LOOK_S, features_of
from relight.prediction.score import HORIZON_S
from relight.prediction.signals import BLOCK, SignalHistory
from relight.prediction.simulate import simulate
from relight.prediction.trace import Happened, SampleTrace, read_trace, traces_in

Array = np.ndarray[Any, Any]
TRAIN, CHECK, HELD_OUT = "train", "check", "held out"
GAP_S = 300
"""A recording that was silent for longer is two."""
_LEAST_S = 2 * BLOCK - 1
FIRST_LOOK = BLOCK // LOOK_S - 1
"""Of a life: at five minutes. Before, all memory is being filled and nothing is usual."""


class RecordedRun(NamedTuple):
    """One life of a node, looked at each five seconds until it failed, or the recording ends."""

    name: str
    at: Array
    looks: Array
    """A row of ``FEATURES`` for each of those times."""
    failed: Happened | None = None

    @property
    def ahead(self) -> Array:
        """Seconds from each look to the failure; infinite without one."""
        return self.failed.at - self.at if self.failed is not None else np.full(len(self.at), np.inf)

    @property
    def doomed(self) -> Array:
        """The looks within the horizon of the failure."""
        return self.ahead <= HORIZON_S


def runs_of(trace: SampleTrace, name: str) -> list[RecordedRun]:
    """Its runs: a failure ends one, and so does a gap. What is shorter than ten minutes says too little of what is usual: left out."""
    ends: list[tuple[float, Happened | None]] = [(one.at, one) for one in trace.happened]
    ends += [(float(trace.at[at]) + 0.5, None) for at in np.flatnonzero(np.diff(trace.at) > GAP_S)] + [(np.inf, None)]
    runs: list[RecordedRun] = []
    begin = -np.inf
    for end, failed in sorted(ends, key=lambda one: one[0]):
        rows = (trace.at > begin) & (trace.at <= end)
        begin = end
        at = trace.at[rows]
        if len(at) and at[-1] - at[0] >= _LEAST_S:
            grid, values = _each_second(at, trace.values[rows])
            looks = features_of(SignalHistory(trace.columns).signals(values))
            runs.append(RecordedRun(f"{name}/{len(runs)}", grid[LOOK_S - 1 :: LOOK_S][FIRST_LOOK:], looks[FIRST_LOOK:], failed))
    return runs


def _each_second(at: Array, values: Array) -> tuple[Array, Array]:
    """The last row of each second; a second without one has that of the second before."""
    grid = np.arange(np.ceil(at[0]), np.floor(at[-1]) + 1)
    return grid, values[np.searchsorted(at, grid, side="right") - 1]


def part_of(name: str) -> str:
    """To which a recording belongs: always to the same, by its name."""
    share = int.from_bytes(blake3.blake3(name.encode()).digest()[:4], "little") / (1 << 32)
    return TRAIN if share < 0.6 else CHECK if share < 0.8 else HELD_OUT


_EXAMPLES = (0.7, 0.2)
"""The shares of runs that fail, and of failures without signs, where it is learned from them; elsewhere they are the simulator's."""


def simulated(seed: int, count: int, parts: tuple[str, ...] = (TRAIN, TRAIN, TRAIN, CHECK, HELD_OUT)) -> Iterator[tuple[str, RecordedRun]]:
    """Made-up runs, and the part of each: three, one and one of five."""
    for number in range(count):
        part = parts[number % len(parts)]
        for run in runs_of(simulate(seed, number, *(_EXAMPLES if part == TRAIN else ())), f"sim-{seed}-{number}"):
            yield part, run


def recorded(directory: Path) -> Iterator[tuple[str, RecordedRun]]:
    """Those of recordings, and the part of each. A damaged file is an error that names it."""
    for path in traces_in(directory):
        for run in runs_of(read_trace(path), path.stem):
            yield part_of(path.stem), run
