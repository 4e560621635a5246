"""How long from one save to the next: the share of time that is lost, and the interval at which it is least.

Failures come as a Poisson process, also during restarts. A save takes ``stall_s`` from the steps, and counts ``durable_s`` after it began:
whoever fails in between goes back to the one before. Then, with T of work and C of stall between two saves, the useful share of time is
``r·T·exp(-r·(R + D - C)) / (exp(r·(T + C)) - 1)``: exactly (a renewal argument, docs/notes/016-planning.md); for D = C it is Daly's.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from relight.errors import ConfigError

_MOST = 700.0
"""Above it, exp of a double overflows."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What saving and failing cost, in seconds."""

    stall_s: float
    """What a save takes from the steps."""
    durable_s: float
    """From a save's beginning until it counts after a failure; never less than the stall."""
    restart_s: float
    """From a failure to the first step again."""

    def __post_init__(self) -> None:
        for name in ("stall_s", "durable_s", "restart_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name} is a number of seconds from 0 on, not {getattr(self, name)!r}")


@dataclass(frozen=True, slots=True)
class Interval:
    """An interval, the share of time that is lost with it, and what decided it: ``optimum``, ``at least`` or ``at most``."""

    seconds: float
    waste: float
    bound: str


def young(stall_s: float, mtbf_s: float) -> float:
    """Young's interval (1974), save to save: the root of twice the stall times the time between failures, and the save itself."""
    return math.sqrt(2 * stall_s * mtbf_s) + stall_s


def daly(stall_s: float, mtbf_s: float) -> float:
    """Daly's of higher order (2006), save to save."""
    if stall_s >= 2 * mtbf_s:
        return mtbf_s + stall_s
    part = stall_s / (2 * mtbf_s)
    return math.sqrt(2 * stall_s * mtbf_s) * (1 + math.sqrt(part) / 3 + part / 9)


def waste(interval_s: float, rate_per_s: float, costs: Costs) -> float:
    """The share of time, from 0 to 1, that goes to stalls, to work that is lost and done again, and to restarts."""
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
    """The interval with the least waste between two bounds: the lower one where saves cost nothing, the upper where nothing fails."""
    if not 0 <= rate_per_s < math.inf:
        raise ConfigError(f"a rate of failures is a number from 0 on, not {rate_per_s!r}")
    if math.isnan(at_least_s) or math.isnan(at_most_s) or at_least_s > at_most_s:
        raise ConfigError(f"an interval of at least {at_least_s!r} and at most {at_most_s!r} s cannot be")
    found = _optimum(rate_per_s, costs.stall_s)
    bound = "at least" if found < at_least_s else "at most" if found > at_most_s else "optimum"
    seconds = min(max(found, at_least_s), at_most_s)
    return Interval(seconds, waste(seconds, rate_per_s, costs), bound)


def _optimum(rate_per_s: float, stall_s: float) -> float:
    """Where the derivative of the waste is zero: ``1 - x = exp(-(x + c))`` for x = rate times work. Neither restart nor durability are in
    it: they cost the same at any interval."""
    if stall_s == 0:
        return 0.0
    if rate_per_s == 0:
        return math.inf
    c = rate_per_s * stall_s
    low, high = 0.0, 1.0
    for _ in range(200):
        x = (low + high) / 2
        low, high = (x, high) if 1 - x > math.exp(-(x + c)) else (low, x)
    # for tiny c, 1 - x and the exponential are the same number: then Young's is as good as exact
    return low / rate_per_s + stall_s if c > 1e-9 else young(stall_s, 1 / rate_per_s)
