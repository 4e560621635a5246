"""When the next save is due, asked of the product: fixed triggers, formulas, and the decision that learns."""

from __future__ import annotations

import math
from collections import deque
from typing import Protocol

from relight.cost_model import Costs, IntervalBounds, ScheduleDecision, ScheduleInput, best_interval, daly, decide, young
from relight.cost_model.schedule import costly
from relight.policy.triggers import TriggerInput, every
from relight.simulator.policies import Policy
from relight.simulator.scenario import HOUR_S, Scenario

_RATHER_S = HOUR_S
"""After a decision that changed nothing, and without a failure since, the next is asked for so much later."""
_REMEMBERED = 9
"""Of saves and restarts."""


class Schedule(Protocol):
    """Told what a run sees, it says at which step the next save is."""

    interval_s: float
    decision: ScheduleDecision | None
    """Where it comes from, if it is decided by what is seen."""

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        """How many steps will have ended when the next save begins; ``last_save``: how many had at the last, or when this life began."""

    def saved(self, now: float, stall_s: float, durable_s: float, ended: int) -> None:
        """One became durable."""

    def on_delayed(self) -> None:
        """One could not begin, as the one before was not durable."""

    def failed(self, progress: bool) -> None:
        """The job did; ``progress``: after at least one step in this life."""

    def resumed(self, now: float, after_s: float, ended: int) -> None:
        """It trains again, so long after it last did."""


class _Fixed:
    """As ``relight.every`` says."""

    decision: ScheduleDecision | None = None

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._step_s = scenario.step_s
        self._steps = int(policy.every) if policy.schedule == "steps" else None
        self._trigger = every(steps=self._steps, minutes=None if self._steps else policy.every / 60)
        self._seconds = policy.every
        self.interval_s = policy.every * scenario.step_s + scenario.save.stall_s if self._steps else policy.every

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        if self._steps is not None:
            found = (ended // self._steps + 1) * self._steps
        else:
            found = ended + max(1, math.ceil((self._seconds - (now - last_save_s)) / self._step_s - 1e-9))
        at = now + (found - ended) * self._step_s
        while not self._trigger.due(TriggerInput(found - 1, at + 1e-6, last_save - 1, last_save_s)):
            found, at = found + 1, at + self._step_s
        return found

    def saved(self, now: float, stall_s: float, durable_s: float, ended: int) -> None:
        pass

    def on_delayed(self) -> None:
        pass

    def failed(self, progress: bool) -> None:
        pass

    def resumed(self, now: float, after_s: float, ended: int) -> None:
        pass


class _Planned(_Fixed):
    """An interval that is worked out before anything runs, by somebody who knows the rates and costs."""

    def __init__(self, scenario: Scenario, policy: Policy) -> None:
        self._step_s = scenario.step_s
        self.interval_s = _formula(scenario, policy.schedule)
        self._count = (
            math.inf if math.isinf(self.interval_s) else max(1, round((self.interval_s - scenario.save.stall_s) / scenario.step_s))
        )

    def next(self, ended: int, now: float, last_save_s: float, last_save: int) -> float:
        return max(ended + 1, last_save + self._count)


class _Adaptive(_Fixed):
    """``relight.cost_model.decide``, told only what a run sees of itself."""

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
        found = ended + max(1, math.ceil((self.interval_s - (now - last_save_s)) / self._step_s - 1e-9))
        at = now + (found - ended) * self._step_s
        assert self._rules.due(TriggerInput(found - 1, at + 1e-6, last_save - 1, last_save_s, interval_s=self.interval_s))
        return found

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
        seen = ScheduleInput(
            now_s=now, step=ended, step_s=scenario.step_s, stalls_s=tuple(self._stalls), durables_s=tuple(self._durables),
            restarts_s=tuple(self._restarts), devices=scenario.gpus, failures=self._failures, watched_s=max(0.0, now - self._down_s),
            pressure=sum(self._late) / len(self._late) if self._late else 0.0, save_bytes=scenario.save.bytes,
        )  # fmt: skip
        self.decision = decide(seen, before, self._bounds)
        self.interval_s = self.decision.interval_s
        still = before is not None and before.interval_s == self.interval_s
        self._again_s = now + (_RATHER_S if still else 0.0)


def schedule_of(scenario: Scenario, policy: Policy) -> Schedule:
    """That of a policy."""
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
    """What saving and failing cost there, as whoever made it knows: the mean over its ways to fail."""
    rates = [(scenario.rate_per_s(one), one) for one in scenario.failure]
    total = sum(rate for rate, _ in rates)
    detect_s = sum(rate * one.detect_s for rate, one in rates) / total if total else 0.0
    restart_s = detect_s + scenario.restart_s + scenario.read_s
    return Costs(scenario.save.stall_s, max(scenario.save.durable_s, scenario.save.stall_s), restart_s)


def _formula(scenario: Scenario, name: str) -> float:
    """The interval from the beginning of one save to that of the next."""
    rate, costs = scenario.failures_per_s, costs_of(scenario)
    if name == "never" or not rate:
        return math.inf
    if name == "oracle":
        return best_interval(
            rate, costs, at_least_s=max(costs.durable_s, scenario.step_s), at_most_s=max(scenario.wall_s, costs.durable_s)
        ).seconds
    return max((young if name == "young" else daly)(costs.stall_s, 1 / rate), costs.durable_s, scenario.step_s)
