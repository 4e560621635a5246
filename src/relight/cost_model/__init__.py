"""How often to save and what it will cost: rates of failures, intervals and decisions, worked out from numbers.

Always: no file, no clock, no randomness; the same numbers give the same answer, and every decision says by which numbers it came about.
All intervals are seconds from the beginning of one save to the beginning of the next. May import: ``policy``, ``errors``.
"""

from relight.cost_model.interval import Costs, Interval, best_interval, daly, waste, young
from relight.cost_model.levels import Level, Levels, Nested, best_levels, onwards
from relight.cost_model.rates import PUBLISHED, Belief, PublishedRate, learn, prior
from relight.cost_model.schedule import IntervalBounds, ScheduleDecision, ScheduleInput, decide

__all__ = [
    "PUBLISHED",
    "Belief",
    "Costs",
    "Interval",
    "IntervalBounds",
    "Level",
    "Levels",
    "Nested",
    "PublishedRate",
    "ScheduleDecision",
    "ScheduleInput",
    "best_interval",
    "best_levels",
    "daly",
    "decide",
    "learn",
    "onwards",
    "prior",
    "waste",
    "young",
]  # fmt: skip
