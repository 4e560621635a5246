"""The best save interval: the share of time that is lost, and the interval from save to save at which it is least.

Failures are a Poisson process, also during restarts. A save takes ``stall_s`` from the steps, and is durable
``durable_s`` after its begin. A failure before that goes back to the save before. With T of work and C of stall between
two saves, the useful share of time is exactly ``r·T·exp(-r·(R + D - C)) / (exp(r·(T + C)) - 1)`` (a renewal argument,
docs/notes/016-planning.md). For D = C it is Daly's formula.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relight.errors import ConfigError

_MOST = 700.0
"""Largest exponent: above it, exp of a double overflows."""


@dataclass(frozen=True, slots=True)
class Costs:
    """Costs of saves and failures, in seconds."""

    stall_s: float
    """Time that a save takes from the steps."""
    durable_s: float
    """Time from a save's begin until it is durable; never less than the stall."""
    restart_s: float
    """Time from a failure to the first step after it."""

    def __post_init__(self) -> None:
        for name in ("stall_s", "durable_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} must be a number of seconds from 0 on, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval, the share of time that is lost with it, and what decided it: ``optimum``, ``at least`` or ``at most``."""

    seconds: float
    waste: float
    bound: str


def young(stall_s: float, mtbf_s: float) -> float:
    """Return Young's interval (1974), from save to save: sqrt(2 · stall · MTBF), plus the stall."""
    return math.sqrt(2 * stall_s * mtbf_s) + stall_s


def daly(stall_s: float, mtbf_s: float) -> float:
    """Return Daly's higher-order interval (2006), from save to save."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    part = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9)


def waste(interval_s: float, rate_per_s: float, costs: Costs) -> float:
    """Return the share of time, from 0 to 1, that is spent on stalls, repeated work, and restarts."""
    work_s = interval_s - costs.stall_s
    if work_s < 0 or math.isnan(interval_s):
        return 1.0
    if rate_per_s <= 0:
        return costs.stall_s / interval_s if interval_s else 0.0
    exponent = rate_per_s * interval_s
    if exponent > _MOST:
        return 1.0
    late_s = costs.restart_s + max(0.0, costs.durable_s - costs.stall_s)
    share = rate_per_s * work_s / math.expm1(exponent) if exponent else 1.0
    return 1.0 - share * math.exp(-min(_MOST, rate_per_s * late_s))


def best_interval(rate_per_s: float, costs: Costs, *, at_least_s: float = 0.0, at_most_s: float = math.inf) -> Interval:
    """Return the interval with the least waste within two bounds: the lower bound if saves are free, the upper one
    without failures."""
    if not 0 <= rate_per_s < math.inf:
        raise ConfigError(f"a rate of failures must be a number from 0 on, not {rate_per_s!r}")
    if math.isnan(at_least_s) or math.isnan(at_most_s) or at_least_s > at_most_s:
        raise ConfigError(
            f"the bounds of the interval are {at_least_s!r} and {at_most_s!r} s",
            hint="the first must not exceed the second",
        )
    best = _optimum(rate_per_s, costs.stall_s)
    bound = "at least" if best < at_least_s else "at most" if best > at_most_s else "optimum"
    seconds = min(max(best, at_least_s), at_most_s)
    return Interval(seconds, waste(seconds, rate_per_s, costs), bound)


def _optimum(rate_per_s: float, stall_s: float) -> float:
    """Return the interval at which the derivative of the waste is zero: ``1 - x = exp(-(x + c))`` for x = rate · work.

    Restart and durability are not in it: they cost the same at any interval.
    """
    if stall_s == 0:
        return 0.0
    if rate_per_s == 0:
        return math.inf
    c = rate_per_s * stall_s
    low, high = 0.0, 1.0
    for _ in range(200):
        x = (low + high) / 2
        low, high = (x, high) if 1 - x > math.exp(-(x + c)) else (low, x)
    # for tiny c, 1 - x and the exponential are equal in double precision: Young's formula is accurate there
    return low / rate_per_s + stall_s if c > 1e-9 else young(stall_s, 1 / rate_per_s)
