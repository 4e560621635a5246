"""A schedule learned from how long a run's earlier lives lasted: used only where a replay of them says that it loses less."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from relight.cost_model.interval import Costs, best_interval, daly

LIVES_LEAST, LIVES_MOST = 16, 128
"""Fewer say nothing; of more, the newest count."""
BETTER = 0.98
"""What is learned must lose no more than this share of what the analytic schedule loses, on each half of the lives."""
LOOKS = 50
"""In a replay the schedule is looked at so often in a life, about."""
FAR = 8.0
"""The rate at one age is at most so many times the mean one, and at least one by it."""


@dataclass(frozen=True, slots=True)
class Aging:
    """How failures depend on a life's age: a Weibull distribution. A shape below 1: what is young fails more often."""

    shape: float
    scale_s: float

    def factor(self, age_s: float) -> float:
        """The rate at that age, by the mean one."""
        mean_s = self.scale_s * math.gamma(1 + 1 / self.shape)
        hazard = self.shape / self.scale_s * (max(age_s, mean_s * 1e-6) / self.scale_s) ** (self.shape - 1)
        return float(min(FAR, max(1 / FAR, hazard * mean_s)))


@dataclass(frozen=True, slots=True)
class Learned:
    """What is learned, and what came of its replay: the shares of time that both schedules would have lost."""

    aging: Aging | None
    """None: the analytic one is as good."""
    lost: float
    analytic: float
    lives: int


def aging_of(lives: Sequence[float]) -> Aging:
    """The Weibull distribution that makes these lives likeliest, its shape by halving."""
    longest = max(lives)
    scaled = [max(one / longest, 1e-9) for one in lives]
    mean_log = sum(map(math.log, scaled)) / len(scaled)
    low, high = 0.2, 5.0
    for _ in range(60):
        shape = (low + high) / 2
        powers = [one**shape for one in scaled]
        slope = sum(power * math.log(one) for power, one in zip(powers, scaled)) / sum(powers) - 1 / shape - mean_log
        low, high = (shape, high) if slope < 0 else (low, shape)
    return Aging(low, longest * (sum(one**low for one in scaled) / len(scaled)) ** (1 / low))


def replay(lives: Sequence[float], costs: Costs, interval_at: Callable[[float], float]) -> float:
    """The share of time that is lost if these lives come again and saves come as ``interval_at`` an age says."""
    useful = spent = 0.0
    for uptime in lives:
        age = kept = 0.0
        while age < uptime:
            interval_s = max(interval_at(age), costs.stall_s + 1e-9)
            count = max(1, math.floor(uptime / interval_s / LOOKS))
            durable = max(0, math.floor((uptime - age - costs.durable_s + costs.stall_s) / interval_s))
            kept += min(count, durable) * (interval_s - costs.stall_s)
            age += count * interval_s
        useful += kept
        spent += uptime + costs.restart_s
    return 1.0 - useful / spent if spent else 0.0


def learn_aging(lives: tuple[float, ...], costs: Costs, floor_s: float) -> Learned:
    """What these lives, oldest first, teach. Every second one is learned from and the others are replayed, and the other way round.

    What costs differ by beyond their first digit is passed over, so that it is worked out once and not at each save.
    """
    rough = Costs(*(_rough(one) for one in (costs.stall_s, max(costs.stall_s, costs.durable_s), costs.restart_s)))
    return _learn_aging(lives, rough, _rough(floor_s))


def _rough(seconds: float) -> float:
    return float(f"{seconds:.1g}")


@lru_cache(maxsize=16)
def _learn_aging(lives: tuple[float, ...], costs: Costs, floor_s: float) -> Learned:
    usable = [one for one in lives if 0 < one < math.inf][-LIVES_MOST:]
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
    """The interval at that age, by Daly's formula."""
    return max(floor_s, daly(costs.stall_s, 1 / (rate_per_s * aging.factor(max(age_s, floor_s)))))
