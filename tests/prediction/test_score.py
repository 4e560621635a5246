"""The worth of alarms."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from relight.prediction.score import (
    COOL_DOWN_S,
    DAY_S,
    HORIZON_S,
    AlarmCosts,
    Alarming,
    Scored,
    alarms_of,
    choose_threshold,
    judge,
    result_of,
    together,
)

COSTS = AlarmCosts(save_s=5, every_s=1800, failures_per_day=0.02)
AT = np.arange(0, 7200, 5.0)


def run(name: str = "a", failed_at: float | None = None, high: tuple[float, ...] = ()) -> Scored:
    """Two hours in which the score is high for a minute from each of these times on."""
    scores = np.full(len(AT), 0.1)
    for begin in high:
        scores[(begin <= AT) & (begin + 60 > AT)] = 0.9
    return Scored(name, AT, scores, failed_at, "leak" if failed_at else "")


@pytest.mark.parametrize("seed", range(20))
def test_alarms_are_the_same_at_once_and_one_by_one(seed: int) -> None:
    """Alarms of a whole run equal those of single updates, so the evaluation measures the real behaviour."""
    rng = random.Random(seed)
    scores = np.array([rng.random() ** rng.choice([1, 4]) for _ in AT])
    groups = np.array([rng.choice("abc") for _ in AT])
    one_by_one, by_group = Alarming(0.5), Alarming(0.5)
    assert [time_s for time_s, score in zip(AT, scores) if one_by_one.update(time_s, score)] == alarms_of(
        AT, scores, 0.5
    )
    alarms = [time_s for time_s, score, group in zip(AT, scores, groups) if by_group.update(time_s, score, group)]
    assert alarms == alarms_of(AT, scores, 0.5, groups) and len(alarms) > len(alarms_of(AT, scores, 0.5))


def test_one_high_score_is_no_alarm_and_alarms_come_ever_more_rarely() -> None:
    """Two high scores in a row are an alarm. Then alarms pause for 5, 10, 20 minutes, and 5 again after a calm hour."""
    assert alarms_of(AT, np.where(AT == 500, 1.0, 0.0), 0.5) == []
    assert alarms_of(AT, np.ones(len(AT)), 0.5)[:5] == [5, 5 + 300, 5 + 900, 5 + 2100, 5 + 3300]
    scores = np.where(np.isin(AT, [0, 5, 400, 405, 5000, 5005, 5300, 5305, 5310]), 1.0, 0.0)
    assert alarms_of(AT, scores, 0.5) == [5, 405, 5005, 5305] and COOL_DOWN_S == 300
    assert together([[5, 405], [10, 470]]) == [5, 405, 470]


def test_an_alarm_is_true_in_the_horizon_too_late_within_a_save_and_else_false() -> None:
    """A failure is found once, however many alarms warned of it."""
    early, first, second, late = 5000 - HORIZON_S - 1, 5000 - HORIZON_S, 4400.0, 4996.0
    result = judge([early, first, second, late], 5000, COSTS)
    assert (result.alarms, result.false, result.warned_s) == (4, 1, HORIZON_S)
    assert judge([late], 5000, COSTS) == (1, 0, None, 0.0)
    assert judge([1.0, 2.0], None, COSTS) == (2, 2, None, 0.0)


def test_the_gain_is_the_loss_of_a_schedule_less_the_remaining_loss() -> None:
    """Against a simulation of when the last save was."""
    rng = random.Random(0)
    for lead in (10.0, 600.0, 1200.0):
        since = [rng.uniform(0, COSTS.every_s) for _ in range(200_000)]
        saved = sum(max(0.0, passed_s - lead) for passed_s in since) / len(since)
        assert judge([5000 - lead], 5000, COSTS).gain_s == pytest.approx(saved, rel=0.02, abs=1)


def test_a_result_counts_events_days_and_seconds() -> None:
    """By hand: two failures, one of them found, and two false alarms in eight hours."""
    runs = [run("a", 6000, (5400,)), run("b", 6000), run("c", high=(1000, 4000)), run("d")]
    result = result_of("x", 0.5, runs, COSTS)
    assert (result.failures, result.found, result.alarms, result.false) == (2, 1, 3, 2)
    assert (result.precision, result.recall, result.lead_s) == (pytest.approx(1 / 3), 0.5, 595)
    days = 4 * 7195 / DAY_S
    assert result.false_per_day == pytest.approx(2 / days)
    gain = 900 - (595 - 595**2 / 3600)
    assert result.net_s_per_day == pytest.approx((gain - 15) / days)
    assert (
        result.net_s_per_day_in_life == pytest.approx(0.02 * (gain - 5) / 2 - 5 * 2 / days)
        and result.net_s_per_day_in_life < 0
    )
    assert result.precision_in_life == pytest.approx(0.01 / (0.01 + 2 / days))
    assert result.pays_from == pytest.approx(5 / gain) and result.recall_by_cause == {"leak": (1, 2)}


def test_nothing_to_divide_by_is_not_a_number() -> None:
    """Without alarms precision is NaN, and without failures recall is."""
    result = result_of("x", 0.5, [run()], COSTS)
    assert math.isnan(result.precision) and math.isnan(result.recall) and result.false_per_day == 0
    assert math.isnan(result_of("x", 0.5, [], COSTS).false_per_day)


def test_the_threshold_has_the_wanted_precision_where_one_has() -> None:
    """False alarms score 0.6, true ones 0.9, so the threshold is between. If all are false, the most precise one is
    taken."""

    def scored(score: float, failed_at: float | None) -> Scored:
        return Scored(
            "x",
            AT,
            np.where((AT > 5000) & (AT < 5060), score, 0.01 * (AT / 7200)),
            failed_at,
            "leak" if failed_at else "",
        )

    runs = [scored(0.9, 5600) for _ in range(5)] + [scored(0.6, None) for _ in range(20)]
    result = choose_threshold("x", runs, 0.7, COSTS)
    assert 0.6 < result.threshold <= 0.9 and (result.found, result.false) == (5, 0)
    assert choose_threshold("x", [scored(0.6, None)], 0.7, COSTS).found == 0
