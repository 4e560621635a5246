"""How often each further tier gets a checkpoint under ``relight.adaptive()``: by the time of a copy, and its cost to
the steps."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median
from typing import NamedTuple

from relight.cost_model import Costs, Level, Nested, ScheduleDecision, level_intervals
from relight.cost_model.levels import least_between
from relight.cost_model.planned import share_restored_from
from relight.cost_model.schedule import STILL
from relight.observe import Event, emit, subscribe
from relight.policy.tiers import Tier, groups_of
from relight.units import duration_text

REMEMBERED = 16
"""Number of copies to a tier over which medians are computed."""
STEPS, STEPS_LEAST = 4096, 8
"""Steps that are remembered to measure how much a copy slows them, and the least number of steps needed during a copy
and outside it."""
NOTICED = 0.02
"""Smallest slowdown, as a share of a step, that counts: smaller differences between steps are noise."""


class Copied(NamedTuple):
    """One finished copy to a tier: the clock's time when it ended, and how many seconds it took."""

    tier: str
    at: float
    took_s: float


class TierPacer:
    """Paces copies to further tiers, on rank 0. All but ``_measure`` runs in the training thread. Without further tiers
    it does nothing."""

    def __init__(self, tiers: Sequence[Tier], clock: Callable[[], float]) -> None:
        self._clock = clock
        self._groups = groups_of(tiers)
        self._lags = {tier.name: tier.lag_s for tier in tiers[1:]}
        self._copies: deque[Copied] = deque(maxlen=64)
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)
        self._took: dict[str, deque[float]] = {}
        self._stalls: dict[str, deque[float]] = {}
        self.announced: tuple[Nested, ...] = ()
        self._undo = subscribe(self._measure) if self._groups else lambda: None

    def stepped(self, at: float, seconds: float) -> None:
        """Record a step that ended at ``at`` without a save."""
        if self._groups:
            self._steps.append((at, seconds))

    def decide(
        self, decision: ScheduleDecision | None, overhead: float, at_most_s: float | None = math.inf
    ) -> dict[str, str | float] | None:
        """Return the fields for a note if the pace has changed: the least seconds between two copies to each tier, and
        the reasons."""
        new = bool(self._copies)
        while self._copies:
            self._learn(self._copies.popleft())
        if decision is None or not (new or self.announced) or not set(self._took).issuperset(self._lags):
            return None  # until each tier has taken a copy, each gets every save
        levels = [self._level(name, number, decision) for number, (name, _, _) in enumerate(self._groups)]
        rate = decision.numbers["rate_per_h"] / 3600
        paces = level_intervals(rate, max(decision.interval_s, 1e-3), levels, overhead, at_most_s)
        if _are_alike(paces, self.announced):
            return None
        self.announced = paces
        return self._event_fields(paces, levels, decision.interval_s)

    def close(self) -> None:
        """Unsubscribe from events."""
        self._undo()

    # -- inside

    def _measure(self, event: Event) -> None:
        """Queue a finished copy. Called in another thread."""
        tier, took_s = event.fields.get("tier"), event.fields.get("seconds")
        if (
            event.name == "drain.done"
            and tier in self._lags
            and isinstance(took_s, (int, float))
            and math.isfinite(took_s)
        ):
            self._copies.append(Copied(str(tier), self._clock(), max(0.0, float(took_s))))

    def _learn(self, copied: Copied) -> None:
        """Record how long a copy took, and how much it slowed the steps during it, compared with the other remembered
        steps. Too few steps of either kind give no measurement of the slowdown."""
        self._took.setdefault(copied.tier, deque(maxlen=REMEMBERED)).append(copied.took_s)
        during = [seconds for ended, seconds in self._steps if copied.at - copied.took_s < ended <= copied.at]
        outside = [seconds for ended, seconds in self._steps if not copied.at - copied.took_s < ended <= copied.at]
        if min(len(during), len(outside)) >= STEPS_LEAST:
            more_s = median(during) - median(outside)
            extra_s = more_s * len(during) if more_s > NOTICED * median(outside) else 0.0
            self._stalls.setdefault(copied.tier, deque(maxlen=REMEMBERED)).append(extra_s)

    def _level(self, name: str, number: int, decision: ScheduleDecision) -> Level:
        """Return the costs of a group of tiers: those of its slowest member."""
        members = next(group.members for group in self._groups if group.name == name)
        took_s = max(median(self._took[member]) for member in members)
        stall_s = max((median(self._stalls[member]) for member in members if member in self._stalls), default=0.0)
        durable_s = max(decision.numbers["durable_s"] + took_s, stall_s)
        return Level(
            name,
            Costs(stall_s, durable_s, decision.numbers["restart_s"]),
            share_restored_from(number, len(self._groups)),
        )

    def _event_fields(self, paces: Sequence[Nested], levels: Sequence[Level], base_s: float) -> dict[str, str | float]:
        data: dict[str, str | float] = {}
        for pace, level, group in zip(paces, levels, self._groups, strict=True):
            every = (
                "every save"
                if pace.multiple == 1
                else f"one in {pace.multiple} saves, every {duration_text(pace.interval_s)}"
            )
            cost = duration_text(level.costs.stall_s) if level.costs.stall_s else "nothing measurable"
            usual = f"{every}: a copy is complete {duration_text(level.costs.durable_s)} after its save started, and costs the steps {cost}"
            for name in group.members:
                lag_s = self._lags[name]
                reason, least_s = usual, least_between(pace, base_s)
                if lag_s is not None and lag_s < pace.interval_s:
                    reason, least_s = (
                        f"at most {duration_text(lag_s)} late, because of lag=; else {usual}",
                        max(0.0, lag_s - base_s),
                    )
                data[name] = round(least_s, 3)
                data[f"{name}.why"] = reason
                emit("tiers.paced", f"tier {name}: {reason}", tier=name, least_s=data[name], reason=reason)
        return data


def _are_alike(paces: Sequence[Nested], before: Sequence[Nested]) -> bool:
    return len(paces) == len(before) and all(
        pace.interval_s / STILL < earlier.interval_s < pace.interval_s * STILL
        for pace, earlier in zip(paces, before, strict=True)
    )
