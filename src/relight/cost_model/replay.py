"""A schedule learned from the uptimes of a run's earlier attempts ("lives").

Used only if a replay of them loses less time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from relight.cost_model.interval import Costs, best_interval, daly

LIVES_LEAST, LIVES_MOST = 16, 128
"""Least and largest number of lives that are used; of more, the newest."""
BETTER = 0.98
"""Largest ratio of the learned schedule's lost time to the analytic schedule's, on each half of the lives."""
EVALUATIONS = 50
"""Approximate number of evaluations of the schedule for each life in a replay."""
FAR = 8.0
"""Largest factor between the rate at an age and the mean rate, in both directions."""


@dataclass(frozen=True, slots=True)
class Aging:
    """Dependence of failures on a life's age: a Weibull distribution.

    With a shape below 1, young lives fail more often.
    """

    shape: float
    scale_s: float

    def factor(self, age_s: float) -> float:
        """Return the failure rate at that age, divided by the mean rate."""
        mean_s = self.scale_s * math.gamma(1 + 1 / self.shape)
        hazard = self.shape / self.scale_s * (max(age_s, mean_s * 1e-6) / self.scale_s) ** (self.shape - 1)
        return float(min(FAR, max(1 / FAR, hazard * mean_s)))


@dataclass(frozen=True, slots=True)
class Learned:
    """The learned schedule, and the shares of time that both schedules lose in the replay."""

    aging: Aging | None
    """None if the analytic schedule is as good."""
    lost: float
    analytic: float
    lives: int


def aging_of(lives: Sequence[float]) -> Aging:
    """Return the maximum-likelihood Weibull distribution of these lives. The shape is found by bisection."""
    longest = max(lives)
    scaled = [max(life / longest, 1e-9) for life in lives]
    mean_log = sum(map(math.log, scaled)) / len(scaled)
    low, high = 0.2, 5.0
    for _ in range(60):
        shape = (low + high) / 2
        powers = [life**shape for life in scaled]
        slope = sum(power * math.log(life) for power, life in zip(powers, scaled)) / sum(powers) - 1 / shape - mean_log
        low, high = (shape, high) if slope < 0 else (low, shape)
    return Aging(low, longest * (sum(life**low for life in scaled) / len(scaled)) ** (1 / low))


def replay(lives: Sequence[float], costs: Costs, interval_at: Callable[[float], float]) -> float:
    """Return the share of time that is lost in these lives, with the intervals that ``interval_at`` returns for an
    age."""
    useful = spent = 0.0
    for uptime in lives:
        age = kept = 0.0
        while age < uptime:
            interval_s = max(interval_at(age), costs.stall_s + 1e-9)
            count = max(1, math.floor(uptime / interval_s / EVALUATIONS))
            durable = max(0, math.floor((uptime - age - costs.durable_s + costs.stall_s) / interval_s))
            kept += min(count, durable) * (interval_s - costs.stall_s)
            age += count * interval_s
        useful += kept
        spent += uptime + costs.restart_s
    return 1.0 - useful / spent if spent else 0.0


def learn_aging(lives: tuple[float, ...], costs: Costs, floor_s: float) -> Learned:
    """Learn a schedule from these lives, oldest first. Every second one is learned from and the others are replayed,
    and vice versa.

    Costs are rounded to one digit, so that the result can be cached and is not computed at each save.
    """
    rough = Costs(*(_rough(cost) for cost in (costs.stall_s, max(costs.stall_s, costs.durable_s), costs.restart_s)))
    return _learn_aging(lives, rough, _rough(floor_s))


def _rough(seconds: float) -> float:
    return float(f"{seconds:.1g}")


@lru_cache(maxsize=16)
def _learn_aging(lives: tuple[float, ...], costs: Costs, floor_s: float) -> Learned:
    usable = [life for life in lives if 0 < life < math.inf][-LIVES_MOST:]
    if len(usable) < LIVES_LEAST:
        return Learned(None, 0.0, 0.0, len(usable))
    ours, theirs, better = 0.0, 0.0, True
    for seen, unseen in ((usable[::2], usable[1::2]), (usable[1::2], usable[::2])):
        rate, aging = len(seen) / sum(seen), aging_of(seen)
        plain = best_interval(rate, costs, at_least_s=floor_s).seconds
        lost = replay(unseen, costs, lambda age, rate=rate, aging=aging: aged(rate, aging, age, costs, floor_s))  # type: ignore[misc]
        analytic = replay(unseen, costs, lambda age, plain=plain: plain)  # type: ignore[misc]
        better = better and lost <= BETTER * analytic
        ours, theirs = ours + lost / 2, theirs + analytic / 2
    return Learned(aging_of(usable) if better else None, ours, theirs, len(usable))


def aged(rate_per_s: float, aging: Aging, age_s: float, costs: Costs, floor_s: float) -> float:
    """Return the interval at that age, by Daly's formula."""
    return max(floor_s, daly(costs.stall_s, 1 / (rate_per_s * aging.factor(max(age_s, floor_s)))))
