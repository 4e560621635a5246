"""Metrics by step, from events of processes on this machine: kept in memory, within bounds."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from relight.serve.downsample import largest_triangles
from relight.serve.values import SeriesDetail

RUNS_MAX, METRICS_MAX, POINTS_MAX = 200, 12, 10_000
"""Runs with metrics from events, metrics of each run, and points of each metric. Twice as many points are downsampled to ``POINTS_MAX``."""
ALL_POINTS_MAX = 1_000_000
"""Points of all metrics and runs together, about 200 MB. The least recently updated runs are dropped first."""


class Curves(NamedTuple):
    """Values by step for each metric, None for a value that is not finite, and the Unix time at which each step ended."""

    values: dict[str, dict[int, float | None]]
    times: dict[int, float]


class CurveStore:
    """Points of metrics by store and run. Thread-safe."""

    def __init__(self) -> None:
        self._curves: OrderedDict[tuple[str, str], Curves] = OrderedDict()
        self._versions: dict[tuple[str, str], int] = {}
        self._newest: dict[tuple[str, str], tuple[float, dict[str, tuple[int, float]]]] = {}
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._curves)

    def version(self, store: str, run: str) -> int:
        """Return a number that changes whenever points of the run are added."""
        return self._versions.get((store, run), 0)

    def newest(self, store: str, run: str) -> tuple[float | None, Mapping[str, tuple[int, float]]]:
        """Return the Unix time of the last reported step, and step and value of each metric's last finite point."""
        return self._newest.get((store, run), (None, {}))

    def points(self, store: str, run: str) -> Curves:
        """Return a copy of a run's points; empty if there are none."""
        with self._lock:
            curves = self._curves.get((store, run), Curves({}, {}))
            return Curves({name: dict(points) for name, points in curves.values.items()}, dict(curves.times))

    def add(
        self,
        store: str,
        run: str,
        steps: Sequence[int],
        times: Sequence[float],
        metrics: Mapping[str, Sequence[object]],
    ) -> None:
        """Add points: of each metric one value for each of ``steps``. Later values of a step replace earlier ones."""
        key = store, run
        with self._lock:
            curves = self._curves.setdefault(key, Curves({}, {}))
            self._curves.move_to_end(key)
            self._versions[key] = self._versions.get(key, 0) + 1
            curves.times.update(zip(steps, times))
            newest = dict(self._newest.get(key, (0.0, {}))[1])
            for name, values in metrics.items():
                if name not in curves.values and len(curves.values) >= METRICS_MAX:
                    continue
                points = curves.values.setdefault(name, {})
                # None: the step has no such metric
                points.update(
                    (step, _finite(value)) for step, value in zip(steps, values, strict=True) if value is not None
                )
                if (finite := _finite(values[-1] if values else None)) is not None:
                    newest[name] = steps[-1], finite
                if len(points) > 2 * POINTS_MAX:
                    curves.values[name] = thinned_points(points, POINTS_MAX)
            self._newest[key] = max(times, default=0.0), newest
            if len(curves.times) > 4 * POINTS_MAX:
                kept = {step for points in curves.values.values() for step in points}
                for step in curves.times.keys() - kept:
                    del curves.times[step]
            self._drop()

    def _drop(self) -> None:
        sizes = {key: sum(map(len, curves.values.values())) for key, curves in self._curves.items()}
        total = sum(sizes.values())
        while len(self._curves) > 1 and (len(self._curves) > RUNS_MAX or total > ALL_POINTS_MAX):
            key, _ = self._curves.popitem(last=False)
            total -= sizes[key]
            del self._versions[key], self._newest[key]


def merged_series(recorded: Curves, reported: Curves) -> dict[str, SeriesDetail]:
    """Return each metric with at most ``POINTS_MAX`` points. A value that a checkpoint has ``recorded`` precedes a ``reported`` one."""
    times = {**reported.times, **recorded.times}
    series = {}
    for name in sorted({*reported.values, *recorded.values}):
        known = {**reported.values.get(name, {}), **recorded.values.get(name, {})}
        points = thinned_points(known, POINTS_MAX)
        seconds = [times.get(step, 0.0) for step in points]
        series[name] = SeriesDetail(name, list(points), seconds, list(points.values()), len(known))
    return series


def newest_points(curves: Curves) -> dict[str, tuple[int, float]]:
    """Return step and value of each metric's finite point with the largest step."""
    newest = {}
    for name, points in curves.values.items():
        if (last := max((point for point in points.items() if point[1] is not None), default=None)) is not None:
            newest[name] = last
    return newest  # type: ignore[return-value] # no value is None


def thinned_points(points: Mapping[int, float | None], most: int) -> dict[int, float | None]:
    """Return at most ``most`` points with ascending steps. If there are more, points without a finite value are left out first."""
    ordered = sorted(points.items())
    if len(ordered) <= most:
        return dict(ordered)
    finite = [(step, value) for step, value in ordered if value is not None]
    steps, values = [step for step, _ in finite], [value for _, value in finite]
    return {steps[index]: values[index] for index in largest_triangles(steps, values, most)}


def _finite(value: object) -> float | None:
    # false for NaN; an int may exceed a float
    return float(value) if isinstance(value, int | float) and abs(value) < 1e300 else None


def smoothed(series: SeriesDetail, points: int) -> SeriesDetail:
    """Return the exponential moving average over about ``points`` points, without bias towards zero at the beginning. 0: unchanged."""
    if points < 2:
        return series
    keep, mean, weight = 1.0 - 1.0 / points, 0.0, 0.0
    values: list[float | None] = []
    for value in series.values:
        if value is None:
            values.append(None)
            continue
        mean, weight = keep * mean + (1.0 - keep) * value, keep * weight + (1.0 - keep)
        values.append(mean / weight)
    return replace(series, values=values)
