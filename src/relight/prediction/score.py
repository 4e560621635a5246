"""Evaluation of alarms, counted as events, not as windows. Pure.

An alarm is *true* if a failure follows within the horizon, and there is still time for a save. A failure counts as
found once, however many alarms precede it. An alarm with less time left than a save takes is too late: neither true nor
false. All other alarms are *false*.

A detector alarms when its score reached its threshold in two windows in a row. Then it is quiet for a cool-down: five
minutes, doubled after each alarm that follows another within an hour, at most twenty minutes. For the rules, each kind
has its own cool-down, so that a network problem does not hide a memory leak. Alarms within a minute count as one.

The cost: each alarm is one more save (training waits ``save_s``). The gain: the work between the last scheduled save
and the last alarm is not lost. Scheduled saves occur every ``every_s``, at times independent of the failure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any, NamedTuple

import numpy as np

Array = np.ndarray[Any, Any]
HORIZON_S = 1200.0
COOL_DOWN_S, COOL_DOWN_MAX_S, CALM_S = 300.0, 1200.0, 3600.0
ENOUGH_S = 60.0
HELD = 2
"""Windows in a row that must reach the threshold: a single one is noise."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class AlarmCosts:
    """Costs and rates for the evaluation."""

    save_s: float = 5.0
    """Seconds that training waits for one more save. A shorter warning is useless."""
    every_s: float = 1800.0
    """Seconds between the schedule's saves."""
    failures_per_day: float = 0.02
    """Failures of one real node per day. Jobs of 1,024 GPUs on 128 nodes failed every 7.9 hours (A. Kokolis et al.,
    HPCA 2025): 0.024 per node and day."""


class Scored(NamedTuple):
    """A run, and one detector's score of each of its windows."""

    name: str
    at: Array
    scores: Array
    failed_at: float | None = None
    cause: str = ""
    groups: Array | None = None
    """For each window, the kind of its alarm, if the detector has a cool-down for each kind."""

    @property
    def seconds(self) -> float:
        """Return the duration of the run."""
        return float(self.at[-1] - self.at[0]) if len(self.at) else 0.0


class Cooling:
    """Cool-down: decides which times above the threshold become alarms."""

    def __init__(self) -> None:
        self._last = self.quiet_until = -math.inf
        self._gap = COOL_DOWN_S

    def update(self, time_s: float) -> bool:
        """Return whether this time becomes an alarm."""
        if time_s < self.quiet_until:
            return False
        self._gap = min(2 * self._gap, COOL_DOWN_MAX_S) if time_s - self._last < CALM_S else COOL_DOWN_S
        self._last, self.quiet_until = time_s, time_s + self._gap
        return True


class Alarming:
    """Decides which scores of a detector become alarms, window by window."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._held = threshold, 0
        self._cooling: dict[object, Cooling] = {}
        self._enough = Enough()

    def update(self, time_s: float, score: float, group: object = None) -> bool:
        """Return whether this window is an alarm."""
        self._held = self._held + 1 if score >= self._threshold else 0
        return (
            self._held >= HELD
            and self._cooling.setdefault(group, Cooling()).update(time_s)
            and self._enough.update(time_s)
        )


class Enough:
    """Keeps the first of the alarms within a minute."""

    def __init__(self) -> None:
        self._last = -math.inf

    def update(self, time_s: float) -> bool:
        """Return whether this alarm is kept."""
        if time_s - self._last < ENOUGH_S:
            return False
        self._last = time_s
        return True


def alarms_of(times: Array, scores: Array, threshold: float, groups: Array | None = None) -> list[float]:
    """Return the alarms of a whole run: the times at which ``Alarming.update`` would return True."""
    over = scores >= threshold
    hot = over.copy()
    for back in range(1, HELD):
        hot[back:] &= over[:-back]
        hot[:back] = False
    if groups is None:
        return _cooled(times[hot])
    return together([_cooled(times[hot & (groups == group)]) for group in np.unique(groups[hot])])


def together(alarms: Sequence[Sequence[float]]) -> list[float]:
    """Return the alarms of several detectors, in order, one of those within a minute."""
    enough = Enough()
    return [time for time in sorted(time for times in alarms for time in times) if enough.update(time)]


def _cooled(times: Array) -> list[float]:
    """Return the times that become alarms. ``times`` are in order."""
    cooling, alarms, index = Cooling(), [], 0
    while index < len(times):
        time = float(times[index])
        cooling.update(time)
        alarms.append(time)
        index = int(np.searchsorted(times, cooling.quiet_until))
    return alarms


class RunAlarms(NamedTuple):
    """One run's alarms."""

    alarms: int
    false: int
    warned_s: float | None
    """Seconds from the first true alarm to the failure; None without one."""
    gain_s: float


def judge(alarms: Sequence[float], failed_at: float | None, costs: AlarmCosts) -> RunAlarms:
    """Return how many alarms are true, and their expected gain over the time of the schedule's last save."""
    if failed_at is None:
        return RunAlarms(len(alarms), len(alarms), None, 0.0)
    ahead = [failed_at - alarm_at for alarm_at in alarms]
    true = [lead_s for lead_s in ahead if costs.save_s <= lead_s <= HORIZON_S]
    false = sum(1 for lead_s in ahead if lead_s > HORIZON_S)
    if not true:
        return RunAlarms(len(alarms), false, None, 0.0)
    every = costs.every_s
    redone = min(every, *true)
    return RunAlarms(len(alarms), false, max(true), every / 2 - (redone - redone**2 / (2 * every)))


@dataclass(frozen=True, slots=True)
class Result:
    """Results of a detector on a history. NaN for a division by zero."""

    detector: str
    threshold: float
    days: float
    failures: int
    found: int
    alarms: int
    false: int
    precision: float
    """Share of found failures in found failures and false alarms, in this history.

    It has many more failures than real jobs.
    """
    recall: float
    lead_s: float
    """The median warning."""
    false_per_day: float
    precision_in_life: float
    """Precision with the real rate ``failures_per_day``."""
    net_s_per_day: float
    """Seconds saved minus seconds spent, compared with no prediction, in this history."""
    net_s_per_day_in_life: float
    pays_from: float
    """Share of true alarms from which alarms pay: the cost of one save, divided by the gain of a true alarm."""
    recall_by_cause: dict[str, tuple[int, int]]
    """By cause, the found failures and all failures."""

    @property
    def smoothed_precision(self) -> float:
        """Return the precision smoothed for few alarms: with one more true and one more false alarm."""
        return (self.found + 1) / (self.found + self.false + 2)

    def to_dict(self) -> dict[str, Any]:
        """Return the result for JSON."""
        return asdict(self)


def result_of(detector: str, threshold: float, runs: Sequence[Scored], costs: AlarmCosts) -> Result:
    """Return the result of a detector on these runs."""
    return tally(
        detector, threshold, runs, [alarms_of(run.at, run.scores, threshold, run.groups) for run in runs], costs
    )


def tally(
    detector: str, threshold: float, runs: Sequence[Scored], alarms: Sequence[Sequence[float]], costs: AlarmCosts
) -> Result:
    """Return the result from the alarms of each run."""
    judged = [judge(times, run.failed_at, costs) for run, times in zip(runs, alarms)]
    days = sum(run.seconds for run in runs) / DAY_S
    failures = sum(run.failed_at is not None for run in runs)
    leads = [result.warned_s for result in judged if result.warned_s is not None]
    warned, false, raised = len(leads), sum(result.false for result in judged), sum(result.alarms for result in judged)
    gain = sum(result.gain_s for result in judged)
    causes: dict[str, tuple[int, int]] = {}
    for run, result in zip(runs, judged):
        if run.failed_at is not None:
            before = causes.get(run.cause, (0, 0))
            causes[run.cause] = (before[0] + (result.warned_s is not None), before[1] + 1)
    recall, false_per_day = _ratio(warned, failures), _ratio(false, days)
    warned_per_day = recall * costs.failures_per_day
    per_failure = _ratio(gain - (raised - false) * costs.save_s, failures)
    return Result(
        detector, threshold, days, failures, warned, raised, false, _ratio(warned, warned + false), recall,
        median(leads) if leads else math.nan, false_per_day, _ratio(warned_per_day, warned_per_day + false_per_day),
        _ratio(gain - raised * costs.save_s, days), costs.failures_per_day * per_failure - false_per_day * costs.save_s,
        _ratio(costs.save_s * warned, gain), dict(sorted(causes.items())),
    )  # fmt: skip


def choose_threshold(detector: str, runs: Sequence[Scored], precision: float, costs: AlarmCosts) -> Result:
    """Return the result of the best threshold.

    It finds most failures with at least that smoothed precision. If no threshold has it, the most precise one is best.
    """
    scores = np.concatenate([run.scores for run in runs]) if runs else np.empty(0)
    quantiles = np.quantile(scores, 1 - np.geomspace(1e-5, 0.3, 50)) if len(scores) else []
    tried = sorted({round(float(score), 6) for score in quantiles} - {0.0})
    results = [result_of(detector, threshold, runs, costs) for threshold in tried]
    results = [result for result in results if result.found]
    precise = [result for result in results if result.smoothed_precision >= precision]
    if precise:
        return max(precise, key=lambda result: (result.found, -result.false, result.threshold))
    return max(
        results,
        key=lambda result: (result.smoothed_precision, result.found),
        default=result_of(detector, 1.0, runs, costs),
    )


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
