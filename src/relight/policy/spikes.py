"""Detect loss spikes, robustly: by the median of recent losses and their median distance from it. Pure."""

from __future__ import annotations

import math
from collections import deque
from statistics import median
from typing import NamedTuple

from relight.errors import ConfigError
from relight.policy.rollback_env import SPIKES

SIGMAS = 10.0
_TO_SIGMA = 1.4826
"""Standard deviation ÷ median distance from the median, for normally distributed values."""


class Jump(NamedTuple):
    """A loss that jumped: its first step (``onset``), and a sentence."""

    onset: int
    why: str


class Spikes:
    """Spike detector; ``update`` it with each step's loss. NaN or infinity is a jump at once. A high loss is one only
    after ``in_a_row`` high losses, because a single bad batch does not matter."""

    def __init__(self, sigmas: float = SIGMAS, in_a_row: int = 5, window: int = 128, begins: int = 50) -> None:
        """``sigmas``: standard deviations above the median from which a loss is high; 0: never. ``window``: number of
        recent losses. ``begins``: least number of losses before any is high."""
        self._sigmas, self._in_a_row, self._begins = sigmas, in_a_row, begins
        self._last: deque[float] = deque(maxlen=window)
        self._high: list[tuple[int, float]] = []

    def update(self, step: int, loss: float) -> Jump | None:
        """Add a step's loss, and return a jump or None. Cost: sorting ``window`` numbers, only if the loss is above all
        of them."""
        if not math.isfinite(loss):
            return Jump(self._high[0][0] if self._high else step, f"the loss is {loss} at step {step}")
        if self._is_high(loss):
            self._high.append((step, loss))
            if len(self._high) >= self._in_a_row:
                first, usual = self._high[0][0], median(self._last)
                stayed = f"and stayed there for {len(self._high)} steps"
                return Jump(first, f"the loss jumped from {usual:.4g} to {loss:.4g} at step {first}, {stayed}")
            return None
        self._high = []
        self._last.append(loss)
        return None

    def _is_high(self, loss: float) -> bool:
        if not self._sigmas or len(self._last) < self._begins or loss <= max(self._last):
            return False
        middle = median(self._last)
        spread = _TO_SIGMA * median(abs(value - middle) for value in self._last)
        return loss > middle + self._sigmas * max(spread, 1e-3 * abs(middle))


def spikes_of(text: str) -> Spikes:
    """Return the detector for a setting's text, a number of standard deviations; 0: only NaN and infinity are jumps."""
    try:
        sigmas = float(text) if text else SIGMAS
    except ValueError:
        sigmas = math.nan
    if not 0 <= sigmas < 1e6:
        raise ConfigError(f"a number of standard deviations, from 0 on, not {text[:40]!r}", where=SPIKES)
    return Spikes(sigmas)
