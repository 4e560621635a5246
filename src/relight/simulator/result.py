"""Results of simulations: goodput, losses and costs of one seed, and their distribution over many."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

USEFUL, LOST, SAVING, DETECTING, WAITING, RESTARTING = "useful", "lost", "saving", "detecting", "waiting", "restarting"
PARTS = (USEFUL, SAVING, LOST, DETECTING, WAITING, RESTARTING)
BUCKETS = 200


class PolicyOutcome(NamedTuple):
    """Result of one policy with one seed. The parts are seconds of wall time, and their sum is the whole time."""

    policy: str
    seed: int
    wall_s: float
    useful_s: float
    """Training that no failure undid."""
    saving_s: float
    """Training waited for saves."""
    spent: dict[str, dict[str, float]]
    """Cause → part → seconds.

    Parts: ``lost`` (training that had to be repeated), ``detecting``, ``waiting``, ``restarting``.
    """
    failures: dict[str, int]
    """Cause → number of failures that ended an attempt or interrupted a recovery."""
    actions: dict[str, int]
    """Decision of the supervisor → how often."""
    restored: dict[str, int]
    """Where the restored state was → how often: ``memory``, ``peers``, a tier, or ``nothing``."""
    saves: int
    durable: int
    """Saves that became durable."""
    alarms: int
    false_alarms: int
    stored_peak: dict[str, int]
    """Bytes, by tier."""
    stored: tuple[int, ...]
    """Peak bytes of all tiers together, in each of 200 equal parts of the time."""
    interval_s: float
    """Seconds between saves at the end of the simulation."""
    bound: str = ""
    """What the newest decision reported of the user's bound on the interval, in words; empty: nothing."""
    bound_cost: float = 0.0
    """The share of the time that the bound costs by that decision."""

    @property
    def goodput(self) -> float:
        """Share of the time that was training which no failure undid."""
        return self.useful_s / self.wall_s

    def parts(self) -> dict[str, float]:
        """Return the seconds of each part, over all causes."""
        seconds = {part: sum(parts.get(part, 0.0) for parts in self.spent.values()) for part in PARTS}
        return {**seconds, USEFUL: self.useful_s, SAVING: self.saving_s}

    def by_cause(self) -> dict[str, float]:
        """Return the seconds that each cause has cost, over all parts."""
        return {cause: sum(parts.values()) for cause, parts in self.spent.items()}


class Distribution(NamedTuple):
    """Median and percentiles of many numbers."""

    median: float
    p5: float
    p95: float


class Summary(NamedTuple):
    """Results of one policy over all seeds."""

    policy: str
    about: str
    seeds: int
    goodput: Distribution
    better: Distribution | None
    """Goodput minus the goodput of the first policy with the same seed."""
    parts: dict[str, float]
    """Mean share of the time of each part."""
    by_cause: dict[str, float]
    """Mean share of the time that each cause has cost."""
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
        """Return plain values for ``--json``."""
        fields = self._asdict()
        return {
            **fields,
            "goodput": self.goodput._asdict(),
            "better": self.better._asdict() if self.better is not None else None,
        }


def summary_of(
    outcomes: Sequence[PolicyOutcome], about: str = "", first: Sequence[PolicyOutcome] | None = None
) -> Summary:
    """Return the summary of one policy's outcomes.

    ``first``: outcomes of the policy to compare with, for the same seeds in the same order.
    """
    count = len(outcomes)
    walls = sum(outcome.wall_s for outcome in outcomes)
    better = None
    if first is not None and first is not outcomes:
        better = spread(
            [outcome.goodput - reference.goodput for outcome, reference in zip(outcomes, first, strict=True)]
        )
    parts: dict[str, float] = dict.fromkeys(PARTS, 0.0)
    causes: dict[str, float] = {}
    for outcome in outcomes:
        _add(parts, outcome.parts(), 1 / walls)
        _add(causes, outcome.by_cause(), 1 / walls)
    worst = max(outcomes, key=lambda outcome: outcome.bound_cost)
    return Summary(
        outcomes[0].policy, about, count, spread([outcome.goodput for outcome in outcomes]), better, parts,
        dict(sorted(causes.items(), key=lambda row: -row[1])),
        sum(sum(outcome.failures.values()) for outcome in outcomes) / count, sum(outcome.saves for outcome in outcomes) / count,
        float(np.median([outcome.interval_s for outcome in outcomes])),
        float(np.median([sum(outcome.stored_peak.values()) for outcome in outcomes])),
        tuple(np.median(np.array([outcome.stored for outcome in outcomes]), axis=0).tolist()),
        _mean([outcome.restored for outcome in outcomes]),
        _mean([outcome.actions for outcome in outcomes]), worst.bound, worst.bound_cost,
    )  # fmt: skip


def spread(values: Sequence[float]) -> Distribution:
    """Return the median, and the 5th and 95th percentile."""
    return Distribution(*(float(percentile) for percentile in np.percentile(np.array(values), [50, 5, 95])))


def _add(into: dict[str, float], addend: dict[str, float], times: float) -> None:
    for name, value in addend.items():
        into[name] = into.get(name, 0.0) + value * times


def _mean(counts: Sequence[dict[str, int]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for count in counts:
        _add(sums, {name: float(value) for name, value in count.items()}, 1 / len(counts))
    return dict(sorted(sums.items(), key=lambda row: -row[1]))
