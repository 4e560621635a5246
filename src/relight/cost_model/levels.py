"""Intervals of the copies to further tiers: multiples of each other."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from relight.cost_model.interval import Costs, best_interval, waste
from relight.cost_model.schedule import following


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
