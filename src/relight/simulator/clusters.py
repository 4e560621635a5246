"""Random clusters that no schedule was tuned for: time lost by the adaptive schedule, by the oracle and by fixed
intervals.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from relight.simulator.engine import simulate
from relight.simulator.failure_events import draw, stream
from relight.simulator.policies import policy_of
from relight.simulator.scenario import DAY_S, Failing, Restarting, SavingCosts, Scenario

FIXED = ("2m", "5m", "10m", "15m", "30m", "1h", "2h", "6h", "1d")
_MTBF_S = (600.0, 10 * DAY_S)
_LIVES = 250
"""Expected number of failures in the simulated time of a cluster. At least a month is simulated."""


class Cluster(NamedTuple):
    """A random cluster. ``off``: its failure rate divided by the published rate for its size."""

    scenario: Scenario
    mtbf_s: float
    off: float


def clusters(count: int = 20, seed: int = 0, lives: float = _LIVES) -> list[Cluster]:
    """Return random clusters. Their MTBFs are spread evenly on a logarithmic scale, from ten minutes to ten days."""
    rng = stream(seed, "clusters")
    low, high = map(math.log, _MTBF_S)
    return [
        _cluster(number, math.exp(low + (high - low) * (number + rng.random()) / count), rng, lives)
        for number in range(count)
    ]


def _cluster(number: int, mtbf_s: float, rng: np.random.Generator, lives: float) -> Cluster:
    off = math.exp(rng.normal(0.0, 0.7))
    gpus = min(max(8, 8 * round(1e6 * 3600 / (25.0 * off * mtbf_s) / 8)), 200_000)
    stall_s = min(math.exp(rng.uniform(math.log(0.2), math.log(60))), mtbf_s / 20)
    durable_s = max(stall_s, min(stall_s * math.exp(rng.uniform(0, math.log(20))), mtbf_s / 10))
    restart_s = min(math.exp(rng.uniform(math.log(30), math.log(1200))), mtbf_s / 4)
    scenario = Scenario(
        name=f"cluster {number}",
        gpus=gpus,
        days=max(30.0, lives * mtbf_s / DAY_S),
        step_s=1.0,
        save=SavingCosts(stall_s=stall_s, durable_s=durable_s),
        restart=Restarting(base_s=restart_s, per_gpu_s=0.0),
        failure=(
            Failing(name="failure", kind="killed", per_day=DAY_S / mtbf_s, takes_nodes=0, broken=0.0, detect_s=0.0),
        ),
    )
    return Cluster(scenario, mtbf_s, off)


def compare(
    cases: Sequence[Cluster],
    *,
    seeds: Sequence[int] = (0,),
    fixed: Sequence[str] = FIXED,
    report: Callable[[str], None] = lambda text: None,
) -> dict[str, Any]:
    """Return the share of time that the adaptive, oracle and fixed schedules lose in each cluster.

    All schedules meet the same failures.
    """
    rows: list[dict[str, Any]] = []
    for number, cluster in enumerate(cases):
        lost = lost_by(cluster.scenario, ("adaptive", "oracle", *fixed), seeds)
        rows.append({
            "mtbf_s": round(cluster.mtbf_s, 1), "gpus": cluster.scenario.gpus, "days": round(cluster.scenario.days, 1),
            "stall_s": round(cluster.scenario.save.stall_s, 3), "durable_s": round(cluster.scenario.save.durable_s, 3),
            "restart_s": round(cluster.scenario.restart.base_s, 1), "lost": lost,
        })  # fmt: skip
        report(
            f"{number + 1} of {len(cases)}: {lost['adaptive'] / lost['oracle'] - 1:+.2%} over the oracle's {lost['oracle']:.4f}"
        )
    mean = {name: float(np.mean([row["lost"][name] for row in rows])) for name in rows[0]["lost"]}
    best = min(fixed, key=mean.__getitem__)
    return {
        "clusters": rows, "mean": mean, "best_fixed": best,
        "over_oracle": mean["adaptive"] / mean["oracle"] - 1,
        "over_oracle_each": [row["lost"]["adaptive"] / row["lost"]["oracle"] - 1 for row in rows],
        "best_fixed_over_oracle": mean[best] / mean["oracle"] - 1,
    }  # fmt: skip


def lost_by(scenario: Scenario, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, float]:
    """Return the share of the time that each policy loses, averaged over the seeds."""
    bounds = {"adaptive": ",at_most=1d,overhead=0.5"}
    made = [policy_of(f"{text}{bounds.get(text, '')},memory=off,backoff_s=0", text) for text in policies]
    sums = dict.fromkeys(policies, 0.0)
    for seed in seeds:
        chance = draw(scenario, seed)
        for policy in made:
            sums[policy.name] += (1 - simulate(scenario, policy, seed, chance=chance).goodput) / len(seeds)
    return sums
