"""When the next save is due, by the product's own code: fixed triggers, formulas, and the adaptive schedule."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from relight.cost_model import (
    Costs,
    IntervalBounds,
    ScheduleDecision,
    ScheduleInput,
    best_interval,
    daly,
    decide,
    young,
)
from relight.cost_model.schedule import costly
from relight.policy.triggers import TriggerInput, every
from relight.simulator.policies import Policy
from relight.simulator.scenario import HOUR_S, Scenario

_QUIET_INTERVAL_S = HOUR_S
"""Seconds until the next decision, after a decision that changed nothing and without a failure since."""
_REMEMBERED = 9
"""Number of saves and restarts that the adaptive schedule remembers."""


class Schedule(Protocol):
    """Decides at which step the next save begins, from what a run observes."""

    interval_s: float
    decision: ScheduleDecision | None
    """The decision that gave ``interval_s``, if the schedule is adaptive."""

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        """Return the number of completed steps at the next save.

        ``last_save``: their number at the last save, or at the start of this attempt.
        """

    def saved(self, now: float, stall_s: float, durable_s: float, ended: int) -> None:
        """Record a save that became durable."""

    def on_delayed(self) -> None:
        """Record a save that could not begin because the previous save was not durable."""

    def failed(self, progress: bool) -> None:
        """Record a failure of the job. ``progress``: at least one step was completed in this attempt."""

    def resumed(self, now: float, after_s: float, ended: int) -> None:
        """Record that the job trains again, ``after_s`` seconds after it last did."""


class _Fixed:
    """Saves at fixed intervals, by ``relight.every``."""

    decision: ScheduleDecision | None = None

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._step_s = scenario.step_s
        self._steps = int(policy.every) if policy.schedule == "steps" else None
        self._trigger = every(steps=self._steps, minutes=None if self._steps else policy.every / 60)
        self._seconds = policy.every
        self.interval_s = policy.every * scenario.step_s + scenario.save.stall_s if self._steps else policy.every

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        if self._steps is not None:
            step = (ended // self._steps + 1) * self._steps
        else:
            step = ended + max(1, math.ceil((self._seconds - (now - last_save_s)) / self._step_s - 1e-9))
        due_at = now + (step - ended) * self._step_s
        while not self._trigger.due(TriggerInput(step - 1, due_at + 1e-6, last_save - 1, last_save_s)):
            step, due_at = step + 1, due_at + self._step_s
        return step

    def saved(self, now: float, stall_s: float, durable_s: float, ended: int) -> None:
        pass

    def on_delayed(self) -> None:
        pass

    def failed(self, progress: bool) -> None:
        pass

    def resumed(self, now: float, after_s: float, ended: int) -> None:
        pass


class _Planned(_Fixed):
    """An interval that is computed before the run from the scenario's true rates and costs."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._step_s = scenario.step_s
        self.interval_s = _formula(scenario, policy.schedule)
        self._count = (
            math.inf
            if math.isinf(self.interval_s)
            else max(1, round((self.interval_s - scenario.save.stall_s) / scenario.step_s))
        )

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        return max(ended + 1, last_save + self._count)


class _Adaptive(_Fixed):
    """Intervals by ``relight.cost_model.decide``, from what a run can observe of itself."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        rules = policy.adaptive
        self._scenario, self._step_s, self._rules = scenario, scenario.step_s, rules
        self._bounds = IntervalBounds(rules.at_least_s, rules.at_most_s, rules.overhead)
        self._stalls, self._durables = deque[float](maxlen=_REMEMBERED), deque[float](maxlen=_REMEMBERED)
        self._restarts = deque[float](maxlen=_REMEMBERED)
        self._late = deque[bool](maxlen=_REMEMBERED)
        self._failures, self._down_s = 0, 0.0
        self._again_s = 0.0
        self._decide(0.0, 0)

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        step = ended + max(1, math.ceil((self.interval_s - (now - last_save_s)) / self._step_s - 1e-9))
        due_at = now + (step - ended) * self._step_s
        assert self._rules.due(
            TriggerInput(step - 1, due_at + 1e-6, last_save - 1, last_save_s, interval_s=self.interval_s)
        )
        return step

    def saved(self, now: float, stall_s: float, durable_s: float, ended: int) -> None:
        new = not self._stalls
        self._stalls.append(stall_s)
        self._durables.append(durable_s)
        self._late.append(False)
        if new or now >= self._again_s:
            self._decide(now, ended)

    def on_delayed(self) -> None:
        self._late.append(True)

    def failed(self, progress: bool) -> None:
        self._failures += progress

    def resumed(self, now: float, after_s: float, ended: int) -> None:
        self._restarts.append(after_s)
        self._down_s += after_s
        self._decide(now, ended)

    def _decide(self, now: float, ended: int) -> None:
        scenario, before = self._scenario, self.decision
        observed = ScheduleInput(
            now_s=now, step=ended, step_s=scenario.step_s, stalls_s=tuple(self._stalls), durables_s=tuple(self._durables),
            restarts_s=tuple(self._restarts), devices=scenario.gpus, failures=self._failures, watched_s=max(0.0, now - self._down_s),
            pressure=sum(self._late) / len(self._late) if self._late else 0.0, save_bytes=scenario.save.bytes,
        )  # fmt: skip
        self.decision = decide(observed, before, self._bounds)
        self.interval_s = self.decision.interval_s
        still = before is not None and before.interval_s == self.interval_s
        self._again_s = now + (_QUIET_INTERVAL_S if still else 0.0)


def schedule_of(scenario: Scenario, policy: Policy) -> Schedule:
    """Return the schedule of a policy."""
    if policy.schedule == "adaptive":
        return _Adaptive(scenario, policy)
    return (_Fixed if policy.schedule in ("every", "steps") else _Planned)(scenario, policy)


def bound_of(decision: ScheduleDecision | None) -> tuple[str, float]:
    """Return what a decision reports of the user's bound, in words, and the share of the time that the bound costs."""
    if decision is None or not decision.bound:
        return "", 0.0
    cost, free_s = decision.numbers["bound_cost"], decision.numbers["free_s"]
    return costly(decision.bound, cost, free_s), cost


def costs_of(scenario: Scenario) -> Costs:
    """Return the scenario's true costs of saves and failures. The detection time is the mean over its causes."""
    rates = [(scenario.rate_per_s(failing), failing) for failing in scenario.failure]
    total = sum(rate for rate, _ in rates)
    detect_s = sum(rate * failing.detect_s for rate, failing in rates) / total if total else 0.0
    restart_s = detect_s + scenario.restart_s + scenario.read_s
    return Costs(scenario.save.stall_s, max(scenario.save.durable_s, scenario.save.stall_s), restart_s)


def _formula(scenario: Scenario, name: str) -> float:
    """Return the seconds from the beginning of one save to the beginning of the next."""
    rate, costs = scenario.failures_per_s, costs_of(scenario)
    if name == "never" or not rate:
        return math.inf
    if name == "oracle":
        return best_interval(
            rate,
            costs,
            at_least_s=max(costs.durable_s, scenario.step_s),
            at_most_s=max(scenario.wall_s, costs.durable_s),
        ).seconds
    return max((young if name == "young" else daly)(costs.stall_s, 1 / rate), costs.durable_s, scenario.step_s)
