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
"""Of one level by the one before, that are tried besides the two next to the ratio of what would be best for each by itself."""


@dataclass(frozen=True, slots=True)
class Level:
    """One place for saves, and the share of all failures after which it is the nearest that is still there."""

    name: str
    costs: Costs
    share: float
    """Of the failures, those that are come back from with this level, as nothing nearer survives them."""


@dataclass(frozen=True, slots=True)
class Nested:
    """One level's part of the plan: each ``multiple``-th save of the nearest level is one of this, too."""

    name: str
    interval_s: float
    multiple: int


@dataclass(frozen=True, slots=True)
class Levels:
    """An interval for each level, near to far, and the share of time that is lost with all of them together."""

    levels: tuple[Nested, ...]
    waste: float


def best_levels(rate_per_s: float, levels: Sequence[Level], *, at_least_s: float = 0.0, at_most_s: float = math.inf) -> Levels:
    """The intervals with the least waste, where each level's is a multiple of the one before, and none is shorter than its saves take
    until they are durable. ``at_least_s`` and ``at_most_s`` bound the nearest's.

    Levels' wastes are taken for independent of each other (Benoit et al. 2017, to first order).
    """
    if not levels or not math.isclose(sum(one.share for one in levels), 1.0, abs_tol=1e-6) or any(one.share < 0 for one in levels):
        raise ConfigError("the shares of failures of all levels are from 0 on, and come to 1", where=", ".join(one.name for one in levels))
    alone = [best_interval(rate_per_s * one.share, one.costs, at_least_s=one.costs.durable_s).seconds for one in levels]
    ratios = []
    for near, far in itertools.pairwise(alone):
        ratio = far / near if 0 < near < math.inf and far < math.inf else 1.0
        ratios.append(sorted({max(1, math.floor(ratio)), max(1, math.ceil(ratio)), *_MULTIPLES}))
    found: list[tuple[float, float, tuple[int, ...]]] = []
    for chosen in itertools.product(*ratios):
        multiples = (1, *itertools.accumulate(chosen, lambda one, other: one * other))
        least = max(at_least_s, *(one.costs.durable_s / multiple for one, multiple in zip(levels, multiples)), 1e-3)
        base = _best_base(rate_per_s, levels, multiples, min(least, at_most_s), at_most_s)
        found.append((total_waste(rate_per_s, levels, [base * one for one in multiples]), base, multiples))
    lost, base, multiples = min(found)
    return Levels(tuple(Nested(one.name, base * multiple, multiple) for one, multiple in zip(levels, multiples)), lost)


def least_between(one: Nested, base_s: float) -> float:
    """The least seconds between two saves that a level gets: saves do not come to the second."""
    return one.interval_s - base_s / 2 if one.multiple > 1 else 0.0


SELDOM = 4096
"""No level gets less than each so-many-th save of the one before."""


def onwards(
    rate_per_s: float, base_s: float, further: Sequence[Level], overhead: float = 1.0, at_most_s: float | None = math.inf
) -> tuple[Nested, ...]:
    """For the levels behind the nearest, whose saves come every ``base_s``: an interval each, multiples of the one before.

    Each is the best by itself, no shorter than its copies take, and than they may take from the steps (``overhead``), otherwise no longer
    than ``at_most_s`` (None: a bound that follows what a copy takes from the steps). One whose copies cost the steps nothing gets them as
    often as it can.
    """
    found, multiple = list[Nested](), 1
    for one in further:
        unit_s, rate = base_s * multiple, rate_per_s * one.share
        least_s = max(one.costs.durable_s, one.costs.stall_s / overhead)
        ratio = min(best_interval(rate, one.costs, at_least_s=least_s).seconds / unit_s, float(SELDOM))
        least = min(SELDOM, max(1, math.ceil(least_s / unit_s - 1e-9)))
        most_s = following(one.costs.stall_s) if at_most_s is None else at_most_s
        most = max(least, math.floor(min(most_s / unit_s, float(SELDOM)) + 1e-9))
        choices = {min(most, max(least, round_to(ratio))) for round_to in (math.floor, math.ceil)}
        multiple *= min(choices, key=lambda count: (waste(unit_s * count, rate, one.costs), count))
        found.append(Nested(one.name, base_s * multiple, multiple))
    return tuple(found)


def total_waste(rate_per_s: float, levels: Sequence[Level], intervals_s: Sequence[float]) -> float:
    """The share of time that is lost with all levels together."""
    useful = 1.0
    for one, interval_s in zip(levels, intervals_s):
        useful *= 1.0 - waste(interval_s, rate_per_s * one.share, one.costs)
    return 1.0 - useful


def _best_base(rate_per_s: float, levels: Sequence[Level], multiples: Sequence[int], low_s: float, high_s: float) -> float:
    """By golden section on the logarithm: the waste has one minimum."""
    if rate_per_s == 0:
        return high_s
    high_s = max(low_s, min(high_s, 20 / rate_per_s))
    golden = (math.sqrt(5) - 1) / 2
    low, high = math.log(low_s), math.log(high_s)

    def lost(at: float) -> float:
        return total_waste(rate_per_s, levels, [math.exp(at) * one for one in multiples])

    for _ in range(80):
        left, right = high - golden * (high - low), low + golden * (high - low)
        low, high = (low, right) if lost(left) <= lost(right) else (left, high)
    ends = [(lost(at), at) for at in (low, high, math.log(low_s))]
    return math.exp(min(ends)[1])
