"""A pattern in earlier lives is used only if it is better on lives that were not used to learn it."""

from __future__ import annotations

import dataclasses
import math
import random

import pytest

from relight.cost_model import Costs, IntervalBounds, ScheduleInput, best_interval, decide, waste
from relight.cost_model.replay import LIVES_LEAST, Aging, aged, aging_of, learn_aging, replay

COSTS = Costs(20.0, 40.0, 60.0)


def lives(shape: float, count: int, seed: int) -> tuple[float, ...]:
    """Uptimes of a Weibull distribution with a mean of some 3,000 s."""
    pick = random.Random(seed)
    return tuple(pick.weibullvariate(3000 / math.gamma(1 + 1 / shape), shape) for _ in range(count))


def test_a_replay_loses_what_the_formula_predicts() -> None:
    """A replay of many lives without a pattern, at a constant interval, loses what the formula predicts."""
    many = lives(1.0, 20_000, 1)
    result = replay(many, COSTS, lambda age: 400.0)
    restarts = Costs(COSTS.stall_s, COSTS.durable_s, 0.0)
    useful = (1 - waste(400.0, 1 / 3000, restarts)) * 3000 / 3060  # restarts do not fail here
    assert result == pytest.approx(1 - useful, abs=0.01)


def test_the_shape_is_found() -> None:
    """The shape of 2,000 lives is estimated within a tenth. Below 1, the rate falls with age."""
    for shape in (0.5, 1.0, 2.0):
        assert aging_of(lives(shape, 2000, 2)).shape == pytest.approx(shape, rel=0.1)
    young = Aging(0.5, 1500.0)
    assert young.factor(10) > young.factor(100) > 1 > young.factor(30_000)


def test_where_young_lives_fail_it_is_used_and_better_on_lives_to_come() -> None:
    """Learned from 100 lives, it loses less than the analytic schedule on 5,000 others."""
    learned = learn_aging(lives(0.4, 100, 3), COSTS, 40.0)
    assert learned.aging is not None
    assert learned.lost < learned.analytic
    aging, rate, to_come = learned.aging, 1 / 3000, lives(0.4, 5000, 4)
    plain = best_interval(rate, COSTS, at_least_s=40.0).seconds
    assert replay(to_come, COSTS, lambda age: aged(rate, aging, age, COSTS, 40.0)) < replay(
        to_come, COSTS, lambda age: plain
    )


def test_without_a_pattern_none_is_used() -> None:
    """In 20 runs without a pattern, at most one is used. Few lives teach nothing."""
    assert sum(learn_aging(lives(1.0, 60, seed), COSTS, 40.0).aging is not None for seed in range(20)) <= 1
    assert learn_aging(lives(0.4, LIVES_LEAST - 1, 5), COSTS, 40.0).aging is None


def test_a_decision_states_that_its_pattern_was_learned() -> None:
    """Young lives save more often than old ones. Only with a learned pattern, the reason has the replay's numbers."""
    seen = ScheduleInput(
        step_s=1.0,
        stalls_s=(20.0,),
        durables_s=(40.0,),
        restarts_s=(60.0,),
        failures=100,
        watched_s=300_000.0,
        lives_s=lives(0.4, 100, 3),
        age_s=60.0,
    )
    wide = IntervalBounds(0, 86400, 0.9)
    young, old = decide(seen, None, wide), decide(dataclasses.replace(seen, age_s=20_000.0), None, wide)
    assert young.interval_s < old.interval_s
    assert "learned" in young.reason
    assert "a replay of 100 lives loses" in young.reason
    assert "learned" not in decide(dataclasses.replace(seen, lives_s=()), None, wide).reason


def test_odd_lives_give_a_decision() -> None:
    """No lives, equal, zero and infinite lives all give a decision."""
    for odd in ((), (0.0,) * 50, (5.0,) * 50, (math.inf,) * 50, (1e-12, 1e12) * 30):
        assert decide(ScheduleInput(stalls_s=(1.0,), lives_s=odd), None, IntervalBounds()).interval_s > 0
