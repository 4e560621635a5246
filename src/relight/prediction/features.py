"""Features of the signals: the last value, and over 30 and 300 s the mean, standard deviation and slope per second.

The slope is by least squares. A window is taken every five seconds. ``features_of`` computes all windows of a run at
once, ``FeatureWindows`` one after the other; the results are equal.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from relight.prediction.signals import AT, SIGNALS

Array = np.ndarray[Any, Any]
SPANS = (30, 300)
WINDOW_INTERVAL_S = 5
"""Seconds from one feature window to the next."""
_KINDS = ("last", *(f"{kind}{span}" for span in SPANS for kind in ("mean", "spread", "slope")))
FEATURES: tuple[str, ...] = tuple(f"{signal}.{kind}" for kind in _KINDS for signal in SIGNALS)


def column(signal: str, kind: str) -> int:
    """Return the column of a feature, such as ``mean300``, of a signal."""
    return _KINDS.index(kind) * len(SIGNALS) + AT[signal]


def columns(*kinds: str) -> list[int]:
    """Return the columns of these features of all signals."""
    return [column(signal, kind) for kind in kinds for signal in SIGNALS]


class FeatureWindow(NamedTuple):
    """Features of a node at one time: the input of detectors."""

    at: float
    values: Array
    """One for each of ``FEATURES``; NaN for signals that were never known."""


def features_of(signals: Array, every: int = WINDOW_INTERVAL_S) -> Array:
    """Return the features of every ``every``-th second of a run. ``signals``: one row for each second."""
    first = np.argmax(np.isfinite(signals), axis=0)
    is_known = np.isfinite(signals).any(axis=0) & (np.arange(len(signals))[:, None] >= first)
    begins = np.where(is_known.any(axis=0), signals[first, np.arange(signals.shape[1])], 0.0)
    values = np.where(is_known, signals, begins)  # an unknown value before the first known one takes that one
    rows = np.arange(every - 1, len(values), every)
    centre = values.mean(axis=0) if len(values) else 0.0
    shifted = values - centre  # squares of small numbers lose little precision
    zero = np.zeros((1, values.shape[1]))
    sums = np.concatenate([zero, np.cumsum(shifted, axis=0)])
    squares = np.concatenate([zero, np.cumsum(shifted**2, axis=0)])
    weighted = np.concatenate([zero, np.cumsum(shifted * np.arange(len(values))[:, None], axis=0)])
    parts = [values[rows]]
    for span in SPANS:
        count = np.minimum(rows + 1, span)[:, None].astype(float)
        ends, starts = rows + 1, np.maximum(rows + 1 - span, 0)
        total = sums[ends] - sums[starts]
        mean = total / count
        spread = np.sqrt(np.maximum((squares[ends] - squares[starts]) / count - mean**2, 0.0))
        moment = weighted[ends] - weighted[starts] - (starts[:, None] + (count - 1) / 2) * total
        slope = moment * 12 / np.maximum(count * (count**2 - 1), 1)
        parts += [mean + centre, spread, slope]
    features = np.concatenate(parts, axis=1).astype(np.float32)
    features[~np.tile(is_known[rows], len(_KINDS))] = np.nan
    return features


class FeatureWindows:
    """The last seconds of one run, from which the present window is computed."""

    def __init__(self) -> None:
        self._span = max(SPANS)
        # each row twice, so that the last ones are always contiguous
        self._ring = np.zeros((2 * self._span, len(SIGNALS)))
        self._known = np.zeros(len(SIGNALS), bool)
        self._all = False
        self._count = 0

    def add(self, signals: Array) -> None:
        """Add the signals of the next second."""
        if not self._all:
            new = np.isfinite(signals) & ~self._known
            if new.any():
                self._ring[:, new] = signals[new]
                self._known |= new
                self._all = bool(self._known.all())
            signals = np.where(self._known, signals, 0.0)
        row = self._count % self._span
        self._ring[row] = self._ring[row + self._span] = signals
        self._count += 1

    def window(self, time_s: float) -> FeatureWindow:
        """Return the present window. ``time_s``: its time."""
        end = (self._count - 1) % self._span + 1 + self._span
        parts = [self._ring[end - 1]]
        for span in SPANS:
            count = min(self._count, span)
            rows = self._ring[end - count : end]
            mean = rows.mean(axis=0)
            rows = rows - mean
            spread = np.sqrt(np.einsum("ij,ij->j", rows, rows) / count)
            slope = (_centred(count) @ rows) * 12 / max(count * (count**2 - 1), 1)
            parts += [mean, spread, slope]
        values = np.concatenate(parts).astype(np.float32)
        if not self._all:
            values[~np.tile(self._known, len(_KINDS))] = np.nan
        return FeatureWindow(time_s, values)


@functools.cache
def _centred(count: int) -> Array:
    return np.asarray(np.arange(count) - (count - 1) / 2)


class Scale:
    """Mean and standard deviation of each feature in a history.

    Outliers are clipped at 8 deviations; unknown values count as the mean.
    """

    def __init__(self, middle: Array, spread: Array) -> None:
        self.middle, self.spread = np.asarray(middle, np.float32), np.asarray(spread, np.float32)

    @classmethod
    def from_rows(cls, rows: Array) -> Scale:
        """Return the scale of rows of features. A constant feature gets a deviation of 1."""
        is_known = np.isfinite(rows)
        count = np.maximum(is_known.sum(axis=0), 1)
        middle = np.where(is_known, rows, 0).sum(axis=0, dtype=np.float64) / count
        spread = np.sqrt(np.where(is_known, (rows - middle) ** 2, 0).sum(axis=0) / count)
        return cls(middle, np.where(spread > 1e-9, spread, 1.0))

    def __call__(self, values: Array) -> Array:
        """Return values in standard deviations from the mean."""
        scaled = (values - self.middle) / self.spread
        return np.asarray(np.clip(np.nan_to_num(scaled, nan=0.0), -8, 8), np.float32)
