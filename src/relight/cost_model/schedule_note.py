"""Encoding of schedule decisions as NOTE records of the run's log."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from relight.cost_model.schedule import ScheduleDecision

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
    """Return the data of the NOTE for a decision."""
    numbers = {name: float(f"{value:.6g}") for name, value in decision.numbers.items() if math.isfinite(value)}
    return {
        "step": step,
        "interval_s": float(f"{decision.interval_s:.6g}"),
        "reason": decision.reason[:_LONGEST],
        **numbers,
    }


def decode(data: Mapping[str, Value]) -> ScheduleNote | None:
    """Return the decision of a NOTE; None if its data is invalid, because a newer Relight may have written it."""
    step, interval_s = data.get("step"), data.get("interval_s")
    if type(step) is not int or not isinstance(interval_s, (int, float)) or not 0 <= interval_s < math.inf:
        return None
    known = {name: value for name, value in data.items() if name not in _OWN and type(value) in (int, float)}
    numbers = {str(name): float(value) for name, value in known.items()}  # type: ignore[arg-type]
    return ScheduleNote(step, float(interval_s), str(data.get("reason", ""))[:_LONGEST], numbers)
