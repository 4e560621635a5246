"""What a simulation came to: goodput, losses, cost of one seed, and their spread over many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

USEFUL, LOST, SAVING, DETECTING, WAITING, RESTARTING = "useful", "lost", "saving", "detecting", "waiting", "restarting"
PARTS = (USEFUL, SAVING, LOST, DETECTING, WAITING, RESTARTING)
BUCKETS = 200


class PolicyOutcome(NamedTuple):
    """Of one policy with one seed. Seconds of the wall; together they are all of it."""

    policy: str
    seed: int
    wall_s: float
    useful_s: float
    """Training that is not lost again."""
    saving_s: float
    """Training waited for saves."""
    spent: dict[str, dict[str, float]]
    """By what failed, of that by part: ``lost`` (training that was to be done again), ``detecting``, ``waiting``, ``restarting``."""
    failures: dict[str, int]
    """That ended a life of the job, or its way back, by what failed."""
    actions: dict[str, int]
    """What the supervisor decided, how often."""
    restored: dict[str, int]
    """From where the job came back, how often: ``memory``, ``peers``, a tier, ``nothing``."""
    saves: int
    durable: int
    """Saves that became durable."""
    alarms: int
    false_alarms: int
    stored_peak: dict[str, int]
    """Bytes, by tier."""
    stored: tuple[int, ...]
    """Bytes on all tiers: the most in each of 200 equal parts of the time."""
    interval_s: float
    """Between saves, as it was in the end."""
    bound: str = ""
    """What the newest decision reported of the user's bound on the interval, in words; empty: nothing."""
    bound_cost: float = 0.0
    """The share of the time that the bound costs by that decision."""

    @property
    def goodput(self) -> float:
        """The share of the time that was training, and stayed."""
        return self.useful_s / self.wall_s

    def parts(self) -> dict[str, float]:
        """Seconds by part, whatever failed."""
        found = {part: sum(one.get(part, 0.0) for one in self.spent.values()) for part in PARTS}
        return {**found, USEFUL: self.useful_s, SAVING: self.saving_s}

    def by_cause(self) -> dict[str, float]:
        """Seconds that each way to fail has cost, all parts together."""
        return {cause: sum(parts.values()) for cause, parts in self.spent.items()}


class Distribution(NamedTuple):
    """Of many numbers."""

    median: float
    p5: float
    p95: float


class Summary(NamedTuple):
    """Of one policy over all seeds."""

    policy: str
    about: str
    seeds: int
    goodput: Distribution
    better: Distribution | None
    """Goodput less the first policy's, seed by seed."""
    parts: dict[str, float]
    """Shares of the time, on average."""
    by_cause: dict[str, float]
    """Shares of the time that each way to fail has cost, on average."""
    failures: float
    saves: float
    interval_s: float
    stored_peak: float
    stored: tuple[float, ...]
    restored: dict[str, float]
    actions: dict[str, float]
    bound: str = ""
    """What the user's bound on the interval costs, in words, of the seed where it costs most; empty: nothing worth a report."""
    bound_cost: float = 0.0

    def to_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        found = self._asdict()
        return {**found, "goodput": self.goodput._asdict(), "better": self.better._asdict() if self.better is not None else None}


def summary_of(outcomes: Sequence[PolicyOutcome], about: str = "", first: Sequence[PolicyOutcome] | None = None) -> Summary:
    """Of one policy's outcomes. ``first``: those of the policy that it is compared with, with the same seeds in the same order."""
    count = len(outcomes)
    walls = sum(one.wall_s for one in outcomes)
    better = None
    if first is not None and first is not outcomes:
        better = spread([mine.goodput - other.goodput for mine, other in zip(outcomes, first, strict=True)])
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    causes: dict[str, float] = {}
    for one in outcomes:
        _add(parts, one.parts(), 1 / walls)
        _add(causes, one.by_cause(), 1 / walls)
    worst = max(outcomes, key=lambda one: one.bound_cost)
    return Summary(
        outcomes[0].policy, about, count, spread([one.goodput for one in outcomes]), better, parts,
        dict(sorted(causes.items(), key=lambda row: -row[1])),
        sum(sum(one.failures.values()) for one in outcomes) / count, sum(one.saves for one in outcomes) / count,
        float(np.median([one.interval_s for one in outcomes])), float(np.median([sum(one.stored_peak.values()) for one in outcomes])),
        tuple(np.median(np.array([one.stored for one in outcomes]), axis=0).tolist()), _mean([one.restored for one in outcomes]),
        _mean([one.actions for one in outcomes]), worst.bound, worst.bound_cost,
    )  # fmt: skip


def spread(values: Sequence[float]) -> Distribution:
    """The median, and what all but a tenth lie between."""
    return Distribution(*(float(one) for one in np.percentile(np.array(values), [50, 5, 95])))


def _add(into: dict[str, float], more: dict[str, float], times: float) -> None:
    for name, value in more.items():
        into[name] = into.get(name, 0.0) + value * times


def _mean(counts: Sequence[dict[str, int]]) -> dict[str, float]:
    found: dict[str, float] = {}
    for one in counts:
        _add(found, {name: float(value) for name, value in one.items()}, 1 / len(counts))
    return dict(sorted(found.items(), key=lambda row: -row[1]))
