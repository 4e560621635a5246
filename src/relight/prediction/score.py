"""What alarms are worth: events, not windows. Pure.

An alarm is *true* if a failure follows within the horizon, and there is still time for a save; a failure counts as found once, however many
alarms warned of it. An alarm that comes later than a save takes is too late: neither true nor false. All others are *false*. A detector
alarms when its score was at its threshold for two looks, and then is quiet for the cool-down: five minutes, twice as long after each
alarm that follows another within an hour, twenty at most. Rules cool down each kind by itself: what is wrong with the network must not
hide a leak. Of alarms within a minute one is enough.

The price: each alarm is one save more (``save_s`` that training waits). The gain: of the work since the last save of the schedule (every
``every_s``, at a time that knows nothing of the failure), what was done before the last alarm is not lost.
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
"""So many looks in a row at the threshold: one alone is noise."""
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class AlarmCosts:
    """What it is reckoned with."""

    save_s: float = 5.0
    """How long training waits for one save more. It is also the least warning that is of any use."""
    every_s: float = 1800.0
    """The interval of the schedule's saves."""
    failures_per_day: float = 0.02
    """Of one node, in earnest: jobs of 1,024 GPUs on 128 nodes failed each 7.9 hours (A. Kokolis et al., HPCA 2025), which is 0.024."""


class Scored(NamedTuple):
    """A run, and what one detector made of each look at it."""

    name: str
    at: Array
    scores: Array
    failed_at: float | None = None
    cause: str = ""
    groups: Array | None = None
    """Of each look, which kind it would be an alarm of, where a detector cools down by kind."""

    @property
    def seconds(self) -> float:
        """How long it was looked at."""
        return float(self.at[-1] - self.at[0]) if len(self.at) else 0.0


class Cooling:
    """Which of the times at which something is wrong become alarms."""

    def __init__(self) -> None:
        self._last = self.quiet_until = -math.inf
        self._gap = COOL_DOWN_S

    def update(self, at: float) -> bool:
        """Whether this one does."""
        if at < self.quiet_until:
            return False
        self._gap = min(2 * self._gap, COOL_DOWN_MAX_S) if at - self._last < CALM_S else COOL_DOWN_S
        self._last, self.quiet_until = at, at + self._gap
        return True


class Alarming:
    """When a detector's scores become alarms, one look after the other."""

    def __init__(self, threshold: float) -> None:
        self._threshold, self._held = threshold, 0
        self._cooling: dict[object, Cooling] = {}
        self._enough = Enough()

    def update(self, at: float, score: float, group: object = None) -> bool:
        """Whether this look is an alarm."""
        self._held = self._held + 1 if score >= self._threshold else 0
        return self._held >= HELD and self._cooling.setdefault(group, Cooling()).update(at) and self._enough.update(at)


class Enough:
    """Of alarms within a minute, the first."""

    def __init__(self) -> None:
        self._last = -math.inf

    def update(self, at: float) -> bool:
        """Whether it is one."""
        if at - self._last < ENOUGH_S:
            return False
        self._last = at
        return True


def alarms_of(at: Array, scores: Array, threshold: float, groups: Array | None = None) -> list[float]:
    """Of a whole run: the times at which ``Alarming`` says so."""
    over = scores >= threshold
    hot = over.copy()
    for back in range(1, HELD):
        hot[back:] &= over[:-back]
        hot[:back] = False
    if groups is None:
        return _cooled(at[hot])
    return together([_cooled(at[hot & (groups == one)]) for one in np.unique(groups[hot])])


def together(alarms: Sequence[Sequence[float]]) -> list[float]:
    """Alarms of several, in order, but for those within a minute."""
    enough = Enough()
    return [at for at in sorted(one for each in alarms for one in each) if enough.update(at)]


def _cooled(times: Array) -> list[float]:
    """Of times in order, those that become alarms."""
    cooling, found, next_one = Cooling(), [], 0
    while next_one < len(times):
        at = float(times[next_one])
        cooling.update(at)
        found.append(at)
        next_one = int(np.searchsorted(times, cooling.quiet_until))
    return found


class RunAlarms(NamedTuple):
    """One run's alarms."""

    alarms: int
    false: int
    warned_s: float | None
    """How long before the failure the first true alarm came; None: it did not."""
    gain_s: float


def judge(alarms: Sequence[float], failed_at: float | None, costs: AlarmCosts) -> RunAlarms:
    """Which are true, and what they gain, in expectation over when the schedule's last save was."""
    if failed_at is None:
        return RunAlarms(len(alarms), len(alarms), None, 0.0)
    ahead = [failed_at - one for one in alarms]
    true = [one for one in ahead if costs.save_s <= one <= HORIZON_S]
    false = sum(1 for one in ahead if one > HORIZON_S)
    if not true:
        return RunAlarms(len(alarms), false, None, 0.0)
    every = costs.every_s
    redone = min(every, *true)
    return RunAlarms(len(alarms), false, max(true), every / 2 - (redone - redone**2 / (2 * every)))


@dataclass(frozen=True, slots=True)
class Result:
    """A detector on a history. Not a number where there is nothing to divide by."""

    detector: str
    threshold: float
    days: float
    failures: int
    found: int
    alarms: int
    false: int
    precision: float
    """Of found failures and false alarms, the share of the former: in this history, which has many more failures than life."""
    recall: float
    lead_s: float
    """The median warning."""
    false_per_day: float
    precision_in_life: float
    """With ``failures_per_day`` instead."""
    net_s_per_day: float
    """Saved less spent, against no prediction, in this history."""
    net_s_per_day_in_life: float
    pays_from: float
    """The share of alarms that must be true for them to pay: one save over what a true one gains."""
    recall_by_cause: dict[str, tuple[int, int]]
    """How many were found, of how many."""

    @property
    def careful(self) -> float:
        """Precision, as far as so few alarms can tell: as if there had been one more of each."""
        return (self.found + 1) / (self.found + self.false + 2)

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


def result_of(detector: str, threshold: float, runs: Sequence[Scored], costs: AlarmCosts) -> Result:
    """Of all runs."""
    return tally(detector, threshold, runs, [alarms_of(run.at, run.scores, threshold, run.groups) for run in runs], costs)


def tally(detector: str, threshold: float, runs: Sequence[Scored], alarms: Sequence[Sequence[float]], costs: AlarmCosts) -> Result:
    """Of alarms that were raised in them."""
    judged = [judge(one, run.failed_at, costs) for run, one in zip(runs, alarms)]
    days = sum(run.seconds for run in runs) / DAY_S
    failures = sum(run.failed_at is not None for run in runs)
    leads = [one.warned_s for one in judged if one.warned_s is not None]
    found, false, raised = len(leads), sum(one.false for one in judged), sum(one.alarms for one in judged)
    gain = sum(one.gain_s for one in judged)
    causes: dict[str, tuple[int, int]] = {}
    for run, one in zip(runs, judged):
        if run.failed_at is not None:
            was = causes.get(run.cause, (0, 0))
            causes[run.cause] = (was[0] + (one.warned_s is not None), was[1] + 1)
    recall, false_per_day = _ratio(found, failures), _ratio(false, days)
    found_per_day = recall * costs.failures_per_day
    per_failure = _ratio(gain - (raised - false) * costs.save_s, failures)
    return Result(
        detector, threshold, days, failures, found, raised, false, _ratio(found, found + false), recall,
        median(leads) if leads else math.nan, false_per_day, _ratio(found_per_day, found_per_day + false_per_day),
        _ratio(gain - raised * costs.save_s, days), costs.failures_per_day * per_failure - false_per_day * costs.save_s,
        _ratio(costs.save_s * found, gain), dict(sorted(causes.items())),
    )  # fmt: skip


def choose_threshold(detector: str, runs: Sequence[Scored], precision: float, costs: AlarmCosts) -> Result:
    """The threshold that finds most with (carefully) that precision; where there is none, the most precise one."""
    scores = np.concatenate([run.scores for run in runs]) if runs else np.empty(0)
    tried = sorted({round(float(one), 6) for one in np.quantile(scores, 1 - np.geomspace(1e-5, 0.3, 50))} - {0.0}) if len(scores) else []
    results = [result_of(detector, one, runs, costs) for one in tried]
    results = [one for one in results if one.found]
    precise = [one for one in results if one.careful >= precision]
    if precise:
        return max(precise, key=lambda one: (one.found, -one.false, one.threshold))
    return max(results, key=lambda one: (one.careful, one.found), default=result_of(detector, 1.0, runs, costs))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan
