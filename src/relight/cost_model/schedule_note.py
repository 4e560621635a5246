"""Decisions as the run's log keeps them: notes, and what they say when they are read again."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.cost_model.schedule import ScheduleDecision

TOPIC = "schedule"
"""Of the NOTE that says from which step on a run saves how often, and why."""
Value = str | int | float | bool | None
_OWN = ("step", "interval_s", "steps", "reason")
_LONGEST = 1000


@dataclass(frozen=True, slots=True)
class ScheduleNote:
    """One decision of a run."""

    step: int
    interval_s: float
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)


def encode(step: int, decision: ScheduleDecision) -> dict[str, Value]:
    """The data of a NOTE."""
    numbers = {name: float(f"{value:.6g}") for name, value in decision.numbers.items() if math.isfinite(value)}
    return {"step": step, "interval_s": float(f"{decision.interval_s:.6g}"), "reason": decision.reason[:_LONGEST], **numbers}


def decode(data: Mapping[str, Value]) -> ScheduleNote | None:
    """What a NOTE says; None if that makes no sense, as a newer Relight may have written it."""
    step, interval_s = data.get("step"), data.get("interval_s")
    if type(step) is not int or not isinstance(interval_s, (int, float)) or not 0 <= interval_s < math.inf:
        return None
    numbers = {str(name): float(value) for name, value in data.items() if name not in _OWN and type(value) in (int, float)}  # type: ignore[arg-type]
    return ScheduleNote(step, float(interval_s), str(data.get("reason", ""))[:_LONGEST], numbers)
