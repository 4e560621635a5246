"""Drift detector: running median and typical distance of each signal, and a cumulative sum of larger distances (CUSUM).

Median and distance follow each new value by small steps (Robbins–Monro for quantiles), so an outlier moves them no more
than other values.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relight.prediction.detect import KIND_OF, Risk
from relight.prediction.features import FeatureWindow, columns
from relight.prediction.signals import SIGNALS, WORDS

Array = np.ndarray[Any, Any]
_WORSE = {
    "memory_free": -1, "disk_free": -1, "psi_memory": 1, "psi_memory_full": 1, "psi_io_full": 1, "faults": 1, "step": 1, "straggle": 1,
    "save": 1, "temperature": 1, "clock": -1, "ecc": 1, "ecc_bad": 1, "silent": 1,
}  # fmt: skip
"""Direction in which each signal gets worse. Other signals are not used."""
_FLOOR = 0.05
"""Least distance from the median that counts as far: all signals are shares, rates or logarithms."""
_STEP = 0.02
"""Step of the median towards each value, in distances."""
_SLACK, _FAR, _HALF = 3.0, 8.0, 60.0
_BEGINS = 24
"""Windows before its first score: two minutes."""


class Drift:
    """The drift detector of one run."""

    name = "drift"

    def __init__(self) -> None:
        self._where = [SIGNALS.index(name) for name in _WORSE]
        self._sign = np.array(list(_WORSE.values()), float)
        self._features = [columns("mean30")[index] for index in self._where]
        self._middle = np.zeros(len(_WORSE))
        self._distance = np.full(len(_WORSE), _FLOOR)
        self._known = np.zeros(len(_WORSE), bool)
        self._sum = np.zeros(len(_WORSE))
        self._count = 0

    def update(self, window: FeatureWindow) -> Risk:
        """See ``Detector``."""
        score, index, beyond = self._next(window.values[self._features].astype(np.float64))
        name = SIGNALS[self._where[index]]
        return Risk(
            score, f"{WORDS[name]}: {beyond:.0f} times its usual distance from its median, for some time", KIND_OF[name]
        )

    def follow(self, features: Array) -> Array:
        """See ``Detector``."""
        detector = self.fresh()
        return np.array([detector._next(row)[0] for row in features[:, self._features].astype(np.float64)])

    def fresh(self) -> Drift:
        """See ``Detector``."""
        return Drift()

    def _next(self, values: Array) -> tuple[float, int, float]:
        self._count += 1
        is_known = np.isfinite(values)
        values = np.where(is_known, values, self._middle)
        self._middle = np.where(is_known & ~self._known, values, self._middle)
        self._known |= is_known
        away = values - self._middle
        beyond = np.clip(self._sign * away / np.maximum(3 * self._distance, _FLOOR), -_FAR, _FAR)
        self._middle += _STEP * self._distance * np.sign(away)
        self._distance = np.maximum(self._distance * (1 + _STEP * np.sign(np.abs(away) - self._distance)), _FLOOR / 3)
        if self._count <= _BEGINS:
            return 0.0, 0, 0.0
        self._sum = np.clip(self._sum + beyond - _SLACK, 0, 4 * _HALF)
        worst = int(np.argmax(self._sum))
        total = float(self._sum[worst])
        return total / (total + _HALF), worst, float(3 * beyond[worst])
