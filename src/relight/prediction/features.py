"""What signals did lately: for each its last value, and over 30 and 300 seconds its mean, spread and slope (a second, by least squares).

A look is taken every five seconds. ``features_of`` takes those of a whole run, ``Windows`` one after the other; both give the same.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import numpy as np

from relight.prediction.signals import AT, SIGNALS

Array = np.ndarray[Any, Any]
SPANS = (30, 300)
LOOK_S = 5
_KINDS = ("last", *(f"{kind}{span}" for span in SPANS for kind in ("mean", "spread", "slope")))
FEATURES: tuple[str, ...] = tuple(f"{signal}.{kind}" for kind in _KINDS for signal in SIGNALS)


def column(signal: str, kind: str) -> int:
    """Where ``mean300`` of a signal stands."""
    return _KINDS.index(kind) * len(SIGNALS) + AT[signal]


def columns(*kinds: str) -> list[int]:
    """Where these of all signals stand."""
    return [column(signal, kind) for kind in kinds for signal in SIGNALS]


class FeatureWindow(NamedTuple):
    """A node, as detectors see it."""

    at: float
    values: Array
    """One for each of ``FEATURES``; not a number for signals that were never known."""


def features_of(signals: Array, every: int = LOOK_S) -> Array:
    """Of a run's signals, a row a second: those of each ``every``-th second."""
    first = np.argmax(np.isfinite(signals), axis=0)
    known = np.isfinite(signals).any(axis=0) & (np.arange(len(signals))[:, None] >= first)
    begins = np.where(known.any(axis=0), signals[first, np.arange(signals.shape[1])], 0.0)
    values = np.where(known, signals, begins)  # what was not known yet stands at what it then was
    rows = np.arange(every - 1, len(values), every)
    centre = values.mean(axis=0) if len(values) else 0.0
    shifted = values - centre  # small numbers, whose squares lose little
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
    found = np.concatenate(parts, axis=1).astype(np.float32)
    found[~np.tile(known[rows], len(_KINDS))] = np.nan
    return found


class FeatureWindows:
    """The last seconds of one run."""

    def __init__(self) -> None:
        self._span = max(SPANS)
        self._ring = np.zeros((2 * self._span, len(SIGNALS)))  # each row twice, so that the last ones always lie in one piece
        self._known = np.zeros(len(SIGNALS), bool)
        self._all = False
        self._count = 0

    def add(self, signals: Array) -> None:
        """A second more."""
        if not self._all:
            new = np.isfinite(signals) & ~self._known
            if new.any():
                self._ring[:, new] = signals[new]
                self._known |= new
                self._all = bool(self._known.all())
            signals = np.where(self._known, signals, 0.0)
        place = self._count % self._span
        self._ring[place] = self._ring[place + self._span] = signals
        self._count += 1

    def window(self, at: float) -> FeatureWindow:
        """As it is now."""
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
        return FeatureWindow(at, values)


@functools.cache
def _centred(count: int) -> Array:
    return np.asarray(np.arange(count) - (count - 1) / 2)


class Scale:
    """What is usual of each feature in a history: their means and spreads. Far ones count as eight spreads, unknown ones as usual."""

    def __init__(self, middle: Array, spread: Array) -> None:
        self.middle, self.spread = np.asarray(middle, np.float32), np.asarray(spread, np.float32)

    @classmethod
    def from_rows(cls, rows: Array) -> Scale:
        """Of rows of features; what never changes there has a spread of 1."""
        known = np.isfinite(rows)
        count = np.maximum(known.sum(axis=0), 1)
        middle = np.where(known, rows, 0).sum(axis=0, dtype=np.float64) / count
        spread = np.sqrt(np.where(known, (rows - middle) ** 2, 0).sum(axis=0) / count)
        return cls(middle, np.where(spread > 1e-9, spread, 1.0))

    def __call__(self, values: Array) -> Array:
        """In spreads from the middle."""
        scaled = (values - self.middle) / self.spread
        return np.asarray(np.clip(np.nan_to_num(scaled, nan=0.0), -8, 8), np.float32)
