"""The cost model: how often to save, and what saving costs. Failure rates, intervals and decisions, computed from
numbers.

Always: no file, no clock, no randomness. The same numbers give the same answer, and every decision records its numbers.
All intervals are seconds from the beginning of one save to the beginning of the next. May import: ``policy``,
``errors``.
"""

from relight.cost_model.interval import Costs, Interval, best_interval, daly, waste, young
from relight.cost_model.levels import Level, Nested, level_intervals
from relight.cost_model.rates import PUBLISHED, Belief, PublishedRate, learn, prior
from relight.cost_model.schedule import IntervalBounds, ScheduleDecision, ScheduleInput, decide

__all__ = [
    "PUBLISHED",
    "Belief",
    "Costs",
    "Interval",
    "IntervalBounds",
    "Level",
    "Nested",
    "PublishedRate",
    "ScheduleDecision",
    "ScheduleInput",
    "best_interval",
    "daly",
    "decide",
    "learn",
    "level_intervals",
    "prior",
    "waste",
    "young",
]  # fmt: skip
