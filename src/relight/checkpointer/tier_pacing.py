"""How often each further tier gets what ``relight.adaptive()`` saves: by how long copies take, and what from the steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from relight.cost_model import Costs, Level, Nested, ScheduleDecision, onwards
from relight.cost_model.levels import least_between
from relight.cost_model.planned import share_behind
from relight.cost_model.schedule import STILL, span
from relight.observe import Event, emit, subscribe
from relight.policy.tiers import Tier, groups_of

REMEMBERED = 16
"""Copies to a tier whose medians count."""
STEPS, STEPS_LEAST = 4096, 8
"""Steps that are remembered, to tell what a copy took from them, and how many are needed within and beside it."""
NOTICED = 0.02
"""By less than this share of a step, steps differ by themselves."""


class Copied(NamedTuple):
    """One copy: when it was there, how long it took, and what that took from the steps."""

    tier: str
    at: float
    took_s: float


class TierPacer:
    """Of the rank that leads, in the loop's thread but for ``_hear``. Without further tiers it does nothing."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._groups = groups_of(tiers)
        self._lags = {one.name: one.lag_s for one in tiers[1:]}
        self._heard: deque[Copied] = deque(maxlen=64)
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._took: dict[str, deque[float]] = {}
        self._stalls: dict[str, deque[float]] = {}
        self.told: tuple[Nested, ...] = ()
        self._undo = subscribe(self._measure) if self._groups else lambda: None

    def stepped(self, at: float, seconds: float) -> None:
        """A step without a save ended."""
        if self._groups:
            self._steps.append((at, seconds))

    def decide(
        self, decision: ScheduleDecision | None, overhead: float, at_most_s: float | None = math.inf
    ) -> dict[str, str | float] | None:
        """What a note is to say, if that is another than before: the least seconds between two copies to each tier, and why."""
        new = bool(self._heard)
        while self._heard:
            self._learn(self._heard.popleft())
        if decision is None or not (new or self.told) or not set(self._took).issuperset(self._lags):
            return None  # as long as a tier was not seen to take a copy, each gets every save
        levels = [self._level(name, number, decision) for number, (name, _, _) in enumerate(self._groups)]
        rate = decision.numbers["rate_per_h"] / 3600
        found = onwards(rate, max(decision.interval_s, 1e-3), levels, overhead, at_most_s)
        if _are_alike(found, self.told):
            return None
        self.told = found
        return self._event_fields(found, levels, decision.interval_s)

    def close(self) -> None:
        """No more of it."""
        self._undo()

    # -- inside

    def _measure(self, event: Event) -> None:
        """In another thread."""
        tier, took_s = event.fields.get("tier"), event.fields.get("seconds")
        if event.name == "drain.done" and tier in self._lags and isinstance(took_s, (int, float)) and math.isfinite(took_s):
            self._heard.append(Copied(str(tier), self._clock(), max(0.0, float(took_s))))

    def _learn(self, one: Copied) -> None:
        """What a copy took from the steps beside it, by the steps behind and in front of it; nothing if there are too few of either."""
        self._took.setdefault(one.tier, deque(maxlen=REMEMBERED)).append(one.took_s)
        within = [seconds for at, seconds in self._steps if one.at - one.took_s < at <= one.at]
        beside = [seconds for at, seconds in self._steps if not one.at - one.took_s < at <= one.at]
        if min(len(within), len(beside)) >= STEPS_LEAST:
            more_s = median(within) - median(beside)
            extra_s = more_s * len(within) if more_s > NOTICED * median(beside) else 0.0
            self._stalls.setdefault(one.tier, deque(maxlen=REMEMBERED)).append(extra_s)

    def _level(self, name: str, number: int, decision: ScheduleDecision) -> Level:
        """A group's slowest member counts."""
        members = next(group.members for group in self._groups if group.name == name)
        took_s = max(median(self._took[one]) for one in members)
        stall_s = max((median(self._stalls[one]) for one in members if one in self._stalls), default=0.0)
        durable_s = max(decision.numbers["durable_s"] + took_s, stall_s)
        return Level(name, Costs(stall_s, durable_s, decision.numbers["restart_s"]), share_behind(number, len(self._groups)))

    def _event_fields(self, found: Sequence[Nested], levels: Sequence[Level], base_s: float) -> dict[str, str | float]:
        data: dict[str, str | float] = {}
        for one, level, group in zip(found, levels, self._groups, strict=True):
            every = "every save" if one.multiple == 1 else f"one in {one.multiple} saves, every {span(one.interval_s)}"
            cost = span(level.costs.stall_s) if level.costs.stall_s else "nothing measurable"
            why = f"{every}: a copy takes {span(level.costs.durable_s)} behind its save's beginning, and {cost} of the steps"
            for name in group.members:
                lag_s = self._lags[name]
                told, least_s = why, least_between(one, base_s)
                if lag_s is not None and lag_s < one.interval_s:
                    told, least_s = f"at most {span(lag_s)} behind, as asked for; else {why}", max(0.0, lag_s - base_s)
                data[name] = round(least_s, 3)
                data[f"{name}.why"] = told
                emit("tiers.paced", f"tier {name}: {told}", tier=name, least_s=data[name], reason=told)
        return data


def _are_alike(found: Sequence[Nested], before: Sequence[Nested]) -> bool:
    return len(found) == len(before) and all(
        one.interval_s / STILL < other.interval_s < one.interval_s * STILL for one, other in zip(found, before, strict=True)
    )
