"""Saves on several levels (memory, peers, a store): an interval for each, multiples of each other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from relight.cost_model.interval import Costs, best_interval, waste
from relight.cost_model.schedule import following
from relight.errors import ConfigError

_MULTIPLES = tuple(1 << power for power in range(9))
"""Multiples of a level's interval by the one before that are tried, in addition to the two integers next to the ratio
of their optima."""


@dataclass(frozen=True, slots=True)
class Level:
    """One level of storage for saves."""

    name: str
    costs: Costs
    share: float
    """Share of the failures that are restored from this level, because no nearer level survives them."""


@dataclass(frozen=True, slots=True)
class Nested:
    """One level's part of the plan: every ``multiple``-th save of the nearest level is also saved to this level."""

    name: str
    interval_s: float
    multiple: int


@dataclass(frozen=True, slots=True)
class Levels:
    """An interval for each level, near to far, and the share of time that is lost with all of them together."""

    levels: tuple[Nested, ...]
    waste: float


def best_levels(
    rate_per_s: float, levels: Sequence[Level], *, at_least_s: float = 0.0, at_most_s: float = math.inf
) -> Levels:
    """Return the intervals with the least waste, each a multiple of the one before, none shorter than its saves take to
    be durable.

    ``at_least_s`` and ``at_most_s`` bound the nearest level's interval. The levels' wastes are treated as independent
    (Benoit et al. 2017, to first order).
    """
    total = sum(level.share for level in levels)
    if not levels or not math.isclose(total, 1.0, abs_tol=1e-6) or any(level.share < 0 for level in levels):
        names = ", ".join(level.name for level in levels)
        raise ConfigError("the levels' shares of failures must be 0 or more, with a sum of 1", where=names)
    alone = [
        best_interval(rate_per_s * level.share, level.costs, at_least_s=level.costs.durable_s).seconds
        for level in levels
    ]
    ratios = []
    for near, far in itertools.pairwise(alone):
        ratio = far / near if 0 < near < math.inf and far < math.inf else 1.0
        ratios.append(sorted({max(1, math.floor(ratio)), max(1, math.ceil(ratio)), *_MULTIPLES}))
    candidates: list[tuple[float, float, tuple[int, ...]]] = []
    for chosen in itertools.product(*ratios):
        multiples = (1, *itertools.accumulate(chosen, lambda product, ratio: product * ratio))
        least = max(at_least_s, *(level.costs.durable_s / multiple for level, multiple in zip(levels, multiples)), 1e-3)
        base = _best_base(rate_per_s, levels, multiples, min(least, at_most_s), at_most_s)
        candidates.append(
            (total_waste(rate_per_s, levels, [base * multiple for multiple in multiples]), base, multiples)
        )
    lost, base, multiples = min(candidates)
    return Levels(
        tuple(Nested(level.name, base * multiple, multiple) for level, multiple in zip(levels, multiples)), lost
    )


def least_between(level: Nested, base_s: float) -> float:
    """Return the least seconds between two saves to a level, half a base interval shorter, because saves do not come on
    the second."""
    return level.interval_s - base_s / 2 if level.multiple > 1 else 0.0


MULTIPLE_MAX = 4096
"""Largest multiple of a level by the one before."""


def level_intervals(
    rate_per_s: float,
    base_s: float,
    further: Sequence[Level],
    overhead: float = 1.0,
    at_most_s: float | None = math.inf,
) -> tuple[Nested, ...]:
    """Return an interval for each level after the nearest one. The nearest level has a save every ``base_s``. Each interval
    is a multiple of the one before.

    Each interval is the best by itself, within bounds. It is no shorter than its copies take, and no shorter than
    ``overhead`` allows for their stalls; else no longer than ``at_most_s`` (None: a bound that grows with a copy's
    stall). If copies to a level cost the steps nothing, it gets them as often as possible.
    """
    nested, multiple = list[Nested](), 1
    for level in further:
        unit_s, rate = base_s * multiple, rate_per_s * level.share
        least_s = max(level.costs.durable_s, level.costs.stall_s / overhead)
        ratio = min(best_interval(rate, level.costs, at_least_s=least_s).seconds / unit_s, float(MULTIPLE_MAX))
        least = min(MULTIPLE_MAX, max(1, math.ceil(least_s / unit_s - 1e-9)))
        most_s = following(level.costs.stall_s) if at_most_s is None else at_most_s
        most = max(least, math.floor(min(most_s / unit_s, float(MULTIPLE_MAX)) + 1e-9))
        choices = {min(most, max(least, round_to(ratio))) for round_to in (math.floor, math.ceil)}
        multiple *= min(choices, key=lambda count: (waste(unit_s * count, rate, level.costs), count))
        nested.append(Nested(level.name, base_s * multiple, multiple))
    return tuple(nested)


def total_waste(rate_per_s: float, levels: Sequence[Level], intervals_s: Sequence[float]) -> float:
    """Return the share of time that is lost with all levels together."""
    useful = 1.0
    for level, interval_s in zip(levels, intervals_s):
        useful *= 1.0 - waste(interval_s, rate_per_s * level.share, level.costs)
    return 1.0 - useful


def _best_base(
    rate_per_s: float, levels: Sequence[Level], multiples: Sequence[int], low_s: float, high_s: float
) -> float:
    """Return the best interval of the nearest level, by golden-section search on its logarithm: the waste has one
    minimum."""
    if rate_per_s == 0:
        return high_s
    high_s = max(low_s, min(high_s, 20 / rate_per_s))
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(low_s), math.log(high_s)

    def lost(logarithm: float) -> float:
        return total_waste(rate_per_s, levels, [math.exp(logarithm) * multiple for multiple in multiples])

    for _ in range(80):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if lost(left) <= lost(right) else (left, high)
    ends = [(lost(end), end) for end in (low, high, math.log(low_s))]
    return math.exp(min(ends)[1])
