"""Decides the save interval from a run's measurements, with the reason.

Pure: the trainer, the simulator and ``explain`` use it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from relight.cost_model.interval import Costs, Interval, best_interval, daly, waste, young
from relight.cost_model.rates import Belief, learn, prior
from relight.cost_model.replay import learn_aging
from relight.errors import ConfigError
from relight.units import count_text, duration_text, percent_text, rate_text

MOVE = 2.0
"""Largest factor by which the interval changes from one decision to the next."""
STILL = 1.1
"""Smaller changes than this factor are not made: the waste is flat near its minimum, and a constant schedule is easier
to follow."""
EARLY_SHARE = 0.75
"""Quantile of the rate that is used early in a run, before the expected time of the first failure."""
LATE = 0.05
"""Last share of all steps, in which the remaining time is divided into equal intervals."""
STALL_GUESS_S, DURABLE_GUESS_S = 0.1, 10.0
"""Assumed costs of a save before the first one."""
RESTART_S, RESTART_PER_DEVICE_S = 50.0, 0.009
"""Assumed seconds of a restart before the first one: a line through FT-HSDP's cold restarts of 16 to 98 thousand
GPUs."""
RISK_MOST, UNSTEADY_MOST = 100.0, 4.0
AT_MOST_S, BOUND_SHARE = 3600.0, 0.01
"""Longest interval in seconds where the user gave none. The bound grows beyond it, so that saves at the bound take at most this share of
the time: otherwise a bound that limits lost work would cost more work than it protects."""
NOTICED = 0.01
"""A user's bound is reported if it costs at least this share of the time."""


@dataclass(frozen=True, slots=True)
class ScheduleInput:
    """A run's measurements at one time. Any of them may be missing: priors replace them, and the reason states that."""

    now_s: float = 0.0
    """Seconds since the run's training began, on any clock. Only for display."""
    step: int = 0
    total_steps: int | None = None
    step_s: float = 0.0
    """Seconds of a step; 0: unknown."""
    stalls_s: tuple[float, ...] = ()
    """Time that each of the last saves took from the steps."""
    durables_s: tuple[float, ...] = ()
    """Time that each of the last saves took until durable."""
    restarts_s: tuple[float, ...] = ()
    """Time from each failure to the first step after it."""
    devices: int = 1
    failures: int = 0
    """Failures with progress since the one before. Several without progress count once."""
    watched_s: float = 0.0
    """Seconds of observation for ``failures``."""
    unsteady: float = 1.0
    """Scatter of the loss, divided by its usual scatter."""
    risk: float = 1.0
    """Factor on the usual failure rate, from the caller's own estimate."""
    foreseen: float = 0.0
    """Probability of a predicted failure, in addition to the usual ones."""
    foreseen_within_s: float = 1200.0
    """Seconds within which the predicted failure would come."""
    foreseen_why: str = ""
    pressure: float = 0.0
    """Share of the last saves that had to wait for the one before, from 0 to 1."""
    save_bytes: int = 0
    bytes_per_s_most: float | None = None
    """Largest long-term bandwidth of the store that saves may use."""
    lives_s: tuple[float, ...] = ()
    """Uptimes of earlier attempts that ended by a failure, oldest first."""
    age_s: float = 0.0
    """Uptime of this attempt."""
    belief: Belief | None = None
    """Prior belief about the failure rate; None: the published prior for ``devices``."""


@dataclass(frozen=True, slots=True)
class IntervalBounds:
    """Bounds of a schedule: of its interval, and of the share of the steps' time that saves take."""

    at_least_s: float = 0.0
    at_most_s: float | None = None
    """None: the user gave no bound, and it follows what a save costs. See ``most_s``."""
    overhead: float = 0.5
    """Largest share of the time that stalls may take."""

    def __post_init__(self) -> None:
        most_s = math.nextafter(math.inf, 0.0) if self.at_most_s is None else self.at_most_s
        if not 0 <= self.at_least_s <= most_s < math.inf or most_s == 0:
            raise ConfigError(
                f"the bounds of the interval are {self.at_least_s!r} and {self.at_most_s!r} s",
                hint="the first must not exceed the second",
            )
        if not 0 < self.overhead < 1:
            raise ConfigError(f"overhead must be a share between 0 and 1, not {self.overhead!r}")

    def most_s(self, stall_s: float) -> float:
        """Return the longest interval in seconds: the user's bound, else an hour or ``stall_s / BOUND_SHARE``, whichever is longer."""
        return following(stall_s, self.at_least_s) if self.at_most_s is None else self.at_most_s


def following(stall_s: float, at_least_s: float = 0.0) -> float:
    """Return the longest interval in seconds where the user gave no bound and a save takes ``stall_s`` from the steps."""
    return max(AT_MOST_S, stall_s / BOUND_SHARE, at_least_s)


@dataclass(frozen=True, slots=True)
class ScheduleDecision:
    """An interval in seconds and in steps, the reason, and the numbers that it was computed from."""

    interval_s: float
    steps: int
    """1 or more; 1 if the time of a step is unknown."""
    reason: str
    numbers: Mapping[str, float] = field(default_factory=dict)
    bound: str = ""
    """The user's bound that decided, if it costs a share of the time worth a report: ``numbers`` has it as ``bound_cost``."""


def decide(seen: ScheduleInput, before: ScheduleDecision | None, limits: IntervalBounds) -> ScheduleDecision:
    """Return the interval from now on.

    It differs from ``before`` by at most a factor of two, and small changes are not made.
    """
    costs, guessed = _costs(seen)
    belief = learn(seen.belief or prior(seen.devices), seen.failures, seen.watched_s)
    phase, rate = _phase(seen, belief)
    risk = min(max(seen.risk, 1 / RISK_MOST), RISK_MOST)
    unsteady = min(max(seen.unsteady, 1.0), UNSTEADY_MOST)
    foreseen = min(max(seen.foreseen, 0.0), 1.0)
    rate *= risk * unsteady**2  # the interval goes with the inverse root of the rate: twice the scatter halves it
    rate += foreseen / max(seen.foreseen_within_s, 1.0)
    floor_s, floor = _floor(seen, costs, limits)
    learned = learn_aging(seen.lives_s, costs, max(floor_s, costs.durable_s))
    factor = learned.aging.factor(max(seen.age_s, floor_s)) if learned.aging is not None else 1.0
    rate *= factor
    most_s = limits.most_s(costs.stall_s)
    best = best_interval(rate, costs, at_least_s=floor_s, at_most_s=max(floor_s, most_s))
    wanted = best.seconds
    asked = "are asked for" if limits.at_most_s is not None else "unless at_most= allows more"
    why = (
        floor
        if floor_s >= most_s
        else {
            "at least": floor,
            "at most": f"no more than {duration_text(most_s)} {asked}",
            "optimum": "least is lost",
        }[best.bound]
    )
    bound, lost, free_s = _costly_bound(seen, costs, limits, rate, best)
    if phase == "late" and seen.total_steps is not None and seen.step_s:
        left_s = (seen.total_steps - seen.step) * seen.step_s
        wanted = max(floor_s, left_s / max(1, math.ceil(left_s / wanted))) if left_s > 0 and wanted > 0 else wanted
    interval_s, moved = _move(wanted, before, floor_s)
    numbers = {
        "wanted_s": wanted, "floor_s": floor_s, "rate_per_h": rate * 3600, "mtbf_s": belief.mtbf_s, "failures": float(seen.failures),
        "watched_s": seen.watched_s, "stall_s": costs.stall_s, "durable_s": costs.durable_s, "restart_s": costs.restart_s,
        "step_s": seen.step_s, "waste": best.waste, "young_s": young(costs.stall_s, 1 / rate), "daly_s": daly(costs.stall_s, 1 / rate),
        "risk": risk, "foreseen": foreseen, "unsteady": unsteady, "pressure": seen.pressure,
        "learned": factor,
        "guesses": float(len(guessed)), "guessed_save": float("save" in guessed), "bound_cost": lost, "free_s": free_s,
    }  # fmt: skip
    steps = max(1, round(interval_s / seen.step_s)) if seen.step_s > 0 else 1
    if seen.step_s > 0 and steps * seen.step_s > most_s:
        steps = max(1, math.floor(most_s / seen.step_s))
    if learned.aging is not None:
        learned_text = f"learned: at an age of {duration_text(seen.age_s)} failures are {factor:.2g} times as frequent as on average"
        shares = f"{percent_text(learned.lost)}, without that {percent_text(learned.analytic)}"
        moved = f", {learned_text} (a replay of {learned.lives} lives loses {shares}){moved}"
    reason = f"every {duration_text(interval_s)}: {why}; {_reason_text(seen, costs, guessed, belief, phase, risk, unsteady)}{moved}"
    if bound:
        reason += f"; {costly(bound, lost, free_s)}"
    return ScheduleDecision(interval_s, steps, reason, numbers, bound)


def costly(bound: str, cost: float, free_s: float) -> str:
    """Return what a user's bound costs, in words."""
    return f"{bound} costs {percent_text(cost)} of the time: {duration_text(free_s)} between saves would lose least"


def bound_cost(interval_s: float, rate_per_s: float, costs: Costs, least_s: float = 0.0) -> tuple[float, float]:
    """Return the share of time that ``interval_s`` loses beyond the best interval, and that interval, no shorter than ``least_s``."""
    free = best_interval(rate_per_s, costs, at_least_s=least_s)
    return max(0.0, waste(interval_s, rate_per_s, costs) - free.waste), free.seconds


def _costly_bound(
    seen: ScheduleInput, costs: Costs, limits: IntervalBounds, rate: float, interval: Interval
) -> tuple[str, float, float]:
    """Return the user's bound that decided, what share of the time it costs, and the interval without it. Nothing below ``NOTICED``, and
    nothing before a save was measured: a guess is no reason for an alarm."""
    by: list[tuple[float, str]] = []
    if interval.bound == "at most" and limits.at_most_s is not None:
        by = [(math.inf, f"at_most={duration_text(limits.at_most_s)}")]  # also where a save takes longer than that
    elif interval.bound == "at least":
        by = [(limits.at_least_s, f"at_least={duration_text(limits.at_least_s)}")]
        by.append((costs.stall_s / limits.overhead, f"overhead={limits.overhead:g}"))
        if seen.bytes_per_s_most and seen.save_bytes:
            by.append((seen.save_bytes / seen.bytes_per_s_most, f"bytes_per_second={seen.bytes_per_s_most:g}"))
    deciding = next((name for seconds, name in by if seconds >= interval.seconds), "")
    if not deciding or not seen.stalls_s:
        return "", 0.0, interval.seconds
    cost, free_s = bound_cost(
        interval.seconds, rate, costs, max(costs.durable_s if seen.durables_s else 0.0, seen.step_s)
    )
    return (deciding, cost, free_s) if cost >= NOTICED else ("", 0.0, free_s)


def _costs(seen: ScheduleInput) -> tuple[Costs, list[str]]:
    guessed = [name for name, known in (("save", seen.stalls_s), ("restart", seen.restarts_s)) if not known]
    stall = median(seen.stalls_s) if seen.stalls_s else STALL_GUESS_S
    durable = median(seen.durables_s) if seen.durables_s else max(stall, DURABLE_GUESS_S)
    restart = median(seen.restarts_s) if seen.restarts_s else RESTART_S + RESTART_PER_DEVICE_S * seen.devices
    return Costs(stall, max(stall, durable), restart), guessed


def _phase(seen: ScheduleInput, belief: Belief) -> tuple[str, float]:
    """Return the phase of the run, and the failure rate to use.

    Early, little is known, so a high quantile of the rate is used.
    """
    if seen.total_steps and seen.step >= seen.total_steps * (1 - LATE):
        return "late", belief.rate_per_s
    if not seen.failures and seen.watched_s < belief.mtbf_s:
        return "early", max(belief.rate_per_s, belief.at(EARLY_SHARE))
    return "middle", belief.rate_per_s


def _floor(seen: ScheduleInput, costs: Costs, limits: IntervalBounds) -> tuple[float, str]:
    """Return the shortest sensible interval, and the reason."""
    pressure = min(max(seen.pressure, 0.0), 1.0)
    floors = [
        (limits.at_least_s, f"no less than {duration_text(limits.at_least_s)} are asked for"),
        (
            costs.durable_s * (1 + pressure) if seen.durables_s else 0.0,
            f"a save takes {duration_text(costs.durable_s)} until it is durable",
        ),
        (
            costs.stall_s / limits.overhead if seen.stalls_s else 0.0,
            f"saves may take {percent_text(limits.overhead)} of the steps' time",
        ),
        (seen.step_s, "there is no save within a step"),
    ]
    if seen.bytes_per_s_most and seen.save_bytes:
        floors.append((seen.save_bytes / seen.bytes_per_s_most, f"saves may write {rate_text(seen.bytes_per_s_most)}"))
    seconds, why = max(floors)
    if pressure > 0 and why == floors[1][1]:
        why += f", and {percent_text(pressure)} of them wait for the one before"
    return seconds, f"as often as a save is free: {why}" if costs.stall_s == 0 else why


def _move(target_s: float, before: ScheduleDecision | None, floor_s: float) -> tuple[float, str]:
    """Return the next interval: by a factor of two at most, but never below ``floor_s``.

    With a save of 30 min, doubling from a guess would mean five saves in a row.
    """
    if before is None or before.interval_s <= 0:
        return target_s, ""
    if before.interval_s / STILL < target_s < before.interval_s * STILL:
        return before.interval_s, "" if duration_text(target_s) == duration_text(
            before.interval_s
        ) else f"; {duration_text(target_s)} would hardly differ"
    least, most = before.interval_s / MOVE, before.interval_s * MOVE
    if least <= target_s <= most:
        return target_s, ""
    return max(
        min(max(target_s, least), most), min(floor_s, target_s)
    ), f"; on its way to {duration_text(target_s)}, by a factor of {MOVE:g} at a time"


def _reason_text(
    seen: ScheduleInput, costs: Costs, guessed: list[str], belief: Belief, phase: str, risk: float, unsteady: float
) -> str:
    low, high = belief.interval(0.9)
    sure = f" ({duration_text(1 / high)} to {duration_text(1 / low)})" if seen.failures else ""
    parts = [
        f"{count_text(seen.failures, 'failure') if seen.failures else 'no failures'} in {duration_text(seen.watched_s)}",
        f"one in {duration_text(belief.mtbf_s)} is expected{sure}",
        f"a save takes {duration_text(costs.stall_s)} of the steps" + (" (a guess)" if "save" in guessed else ""),
        f"a restart {duration_text(costs.restart_s)}" + (" (a guess)" if "restart" in guessed else ""),
    ]
    if phase != "middle":
        parts.append({"early": "early: the worse end of it counts", "late": "late: the rest is parted evenly"}[phase])
    if risk != 1.0:
        parts.append(f"failures are {risk:.2g} times as likely as usual")
    if seen.foreseen > 0:
        why = seen.foreseen_why.replace(", ", " ").replace("; ", " ")  # these separate the parts
        how = f"one is foreseen within {duration_text(seen.foreseen_within_s)} ({percent_text(min(seen.foreseen, 1.0))} probable)"
        parts.append(how + (f": {why}" if why else ""))
    if unsteady > 1.0:
        parts.append(f"the loss is {unsteady:.2g} times as restless as usual")
    return ", ".join(parts)
