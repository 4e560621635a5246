"""Intervals against published numbers, against brute force, and at the ends of what makes sense."""

from __future__ import annotations

import math
import random

import pytest

from relight.cost_model import Costs, best_interval, daly, waste, young
from relight.errors import ConfigError

AUPY = 7519.0, 600.0, 660.0
"""Aupy et al., table 2: time between failures; a save; a restart with its downtime."""


def test_published_numbers_come_out() -> None:
    """Aupy et al., table 2: Young 3,604, Daly 3,733, RFO 2,869 and the optimum 3,218 s, from save to save."""
    mtbf, save, restart = AUPY
    assert round(young(save, mtbf)) == 3604
    assert round(young(save, mtbf + restart)) == 3733  # the table's "Daly" is of first order, with the restart
    assert round(young(save, mtbf - restart) - save) == 2869
    assert best_interval(1 / mtbf, Costs(save, save, restart)).seconds == pytest.approx(3218, abs=1)
    assert daly(save, mtbf) == pytest.approx(3218, abs=1)  # Daly's formula of higher order


def test_the_optimum_is_where_the_waste_is_least() -> None:
    """No other interval of a fine grid loses less, for any costs."""
    pick = random.Random(1)
    for _ in range(50):
        rate = 1 / math.exp(pick.uniform(math.log(600), math.log(1e7)))
        stall = math.exp(pick.uniform(math.log(1e-3), math.log(100)))
        costs = Costs(stall, stall * pick.uniform(1, 5), pick.uniform(0, 600))
        result = best_interval(rate, costs)
        assert result.bound == "optimum"
        assert result.waste == waste(result.seconds, rate, costs)
        assert all(waste(result.seconds * 1.02**k, rate, costs) >= result.waste - 1e-12 for k in range(-200, 200))


def test_the_waste_is_that_of_played_lives() -> None:
    """Simulated lives lose what the formula predicts, with failures during saves and restarts."""
    pick = random.Random(2)
    rate, costs, interval = 1 / 1000, Costs(10, 40, 60), 200.0
    useful = spent = 0.0
    for _ in range(200_000):
        uptime = pick.expovariate(rate)
        useful += max(0, math.floor((uptime - costs.durable_s + costs.stall_s) / interval)) * (interval - costs.stall_s)
        spent += uptime
        while (trial := pick.expovariate(rate)) < costs.restart_s:
            spent += trial
        spent += costs.restart_s
    assert waste(interval, rate, costs) == pytest.approx(1 - useful / spent, abs=0.003)


def test_young_and_daly_are_near_where_they_hold() -> None:
    """Young's interval is within 1 % of the optimum if a save is much shorter than the time between failures. Daly's is
    close for longer saves, too."""
    for stall, mtbf in ((1, 1e5), (5, 1e6), (0.1, 1e4)):
        best = best_interval(1 / mtbf, Costs(stall, stall, 0)).seconds
        assert young(stall, mtbf) == pytest.approx(best, rel=0.01)
        assert daly(stall, mtbf) == pytest.approx(best, rel=0.001)
    best = best_interval(1 / 7519, Costs(600, 600, 0)).seconds
    assert abs(daly(600, 7519) - best) < abs(young(600, 7519) - best)


def test_bounds_hold_and_are_reported() -> None:
    """Free saves have the shortest allowed interval. Without failures the interval is the longest allowed."""
    free, dear = Costs(0, 3, 60), Costs(1, 3, 60)
    assert best_interval(1e-4, free, at_least_s=3).seconds == 3
    assert best_interval(1e-4, free, at_least_s=3).bound == "at least"
    assert best_interval(0.0, dear, at_most_s=600).bound == "at most"
    assert best_interval(1e-4, dear, at_most_s=60).seconds == 60
    assert best_interval(0.0, dear).waste == 0


def test_neither_huge_nor_tiny_numbers_break_it() -> None:
    """The waste stays between 0 and 1, and the optimum finite, over all magnitudes."""
    for rate in (0.0, 1e-15, 1e-6, 1.0, 1e6):
        for stall in (0.0, 1e-9, 1.0, 1e9):
            costs = Costs(stall, stall, 1e3)
            result = best_interval(rate, costs, at_most_s=1e12)
            assert 0 <= result.waste <= 1
            assert 0 <= result.seconds <= 1e12


@pytest.mark.parametrize("bad", [-1.0, math.nan, math.inf], ids=str)
def test_invalid_costs_and_rates_are_refused(bad: float) -> None:
    """Negative, NaN and infinite costs and rates are refused."""
    with pytest.raises(ConfigError):
        Costs(bad, 0, 0)
    with pytest.raises(ConfigError):
        best_interval(bad, Costs(1, 1, 1))
    with pytest.raises(ConfigError):
        best_interval(1e-4, Costs(1, 1, 1), at_least_s=10, at_most_s=5)
