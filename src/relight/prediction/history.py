"""Labelled history: recorded and simulated runs, each in one set: training, validation or held-out.

The split is by run, never by window: windows of one run are similar, so a detector trained on some of them knows the
others.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import blake3
import numpy as np

from relight.prediction.features import WINDOW_INTERVAL_S, features_of
from relight.prediction.score import HORIZON_S
from relight.prediction.signals import BLOCK, SignalHistory
from relight.prediction.simulate import simulate
from relight.prediction.trace import Happened, SampleTrace, read_trace, traces_in

Array = np.ndarray[Any, Any]
TRAIN, CHECK, HELD_OUT = "train", "check", "held out"
GAP_S = 300
"""Seconds of a gap at which a recording is split into two runs."""
_LEAST_S = 2 * BLOCK - 1
FIRST_WINDOW = BLOCK // WINDOW_INTERVAL_S - 1
"""First window of a run that counts: at five minutes.

Before that, memory is being filled and no usual values are known.
"""


class RecordedRun(NamedTuple):
    """One run of a node, with a feature window every five seconds until it failed, or until the recording ends."""

    name: str
    at: Array
    features: Array
    """A row of ``FEATURES`` for each time in ``at``."""
    failed: Happened | None = None

    @property
    def ahead(self) -> Array:
        """Return the seconds from each window to the failure; infinite without a failure."""
        return self.failed.at - self.at if self.failed is not None else np.full(len(self.at), np.inf)

    @property
    def before_failure(self) -> Array:
        """Return which windows are within the horizon before the failure."""
        return self.ahead <= HORIZON_S


def runs_of(trace: SampleTrace, name: str) -> list[RecordedRun]:
    """Return the runs of a recording.

    A failure or a gap ends a run. Runs under ten minutes are left out: they show no usual values.
    """
    ends: list[tuple[float, Happened | None]] = [(failure.at, failure) for failure in trace.happened]
    ends += [(float(trace.at[row]) + 0.5, None) for row in np.flatnonzero(np.diff(trace.at) > GAP_S)] + [(np.inf, None)]
    runs: list[RecordedRun] = []
    begin = -np.inf
    for end, failed in sorted(ends, key=lambda entry: entry[0]):
        rows = (trace.at > begin) & (trace.at <= end)
        begin = end
        times = trace.at[rows]
        if len(times) and times[-1] - times[0] >= _LEAST_S:
            grid, values = _each_second(times, trace.values[rows])
            windows = features_of(SignalHistory(trace.columns).signals(values))
            runs.append(
                RecordedRun(
                    f"{name}/{len(runs)}",
                    grid[WINDOW_INTERVAL_S - 1 :: WINDOW_INTERVAL_S][FIRST_WINDOW:],
                    windows[FIRST_WINDOW:],
                    failed,
                )
            )
    return runs


def _each_second(times: Array, values: Array) -> tuple[Array, Array]:
    """Return the last row of each second. A second without a row gets the row of the second before."""
    grid = np.arange(np.ceil(times[0]), np.floor(times[-1]) + 1)
    return grid, values[np.searchsorted(times, grid, side="right") - 1]


def part_of(name: str) -> str:
    """Return the set that a recording belongs to. It depends only on the recording's name."""
    share = int.from_bytes(blake3.blake3(name.encode()).digest()[:4], "little") / (1 << 32)
    return TRAIN if share < 0.6 else CHECK if share < 0.8 else HELD_OUT


_EXAMPLES = (0.7, 0.2)
"""Shares of failing runs, and of failures without signs, in simulated training runs.

Other runs have the simulator's defaults.
"""


def simulated(
    seed: int, count: int, parts: tuple[str, ...] = (TRAIN, TRAIN, TRAIN, CHECK, HELD_OUT)
) -> Iterator[tuple[str, RecordedRun]]:
    """Yield simulated runs and the set of each: of five, three for training, one for validation, one held out."""
    for number in range(count):
        part = parts[number % len(parts)]
        for run in runs_of(simulate(seed, number, *(_EXAMPLES if part == TRAIN else ())), f"sim-{seed}-{number}"):
            yield part, run


def recorded(directory: Path) -> Iterator[tuple[str, RecordedRun]]:
    """Yield the runs of the recordings in a directory, and the set of each.

    Raise ``CorruptCheckpoint`` for a damaged file.
    """
    for path in traces_in(directory):
        for run in runs_of(read_trace(path), path.stem):
            yield part_of(path.stem), run
