"""Twenty clusters that nobody has seen: what a schedule that learns loses, beside one that knows, and those that are fixed."""

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
"""How many failures are to be expected in a cluster's time; at least a month of it is simulated."""


class Cluster(NamedTuple):
    """One of them: how often it fails, what saves and restarts cost; how far its rate is from what is published for its size."""

    scenario: Scenario
    mtbf_s: float
    off: float


def clusters(count: int = 20, seed: int = 0, lives: float = _LIVES) -> list[Cluster]:
    """Made up from a seed: times between failures evenly spread, on a logarithm, from ten minutes to ten days."""
    rng = stream(seed, "clusters")
    low, high = map(math.log, _MTBF_S)
    return [_cluster(number, math.exp(low + (high - low) * (number + rng.random()) / count), rng, lives) for number in range(count)]


def _cluster(number: int, mtbf_s: float, rng: np.random.Generator, lives: float) -> Cluster:
    off = math.exp(rng.normal(0.0, 0.7))
    gpus = min(max(8, 8 * round(1e6 * 3600 / (25.0 * off * mtbf_s) / 8)), 200_000)
    stall_s = min(math.exp(rng.uniform(math.log(0.2), math.log(60))), mtbf_s / 20)
    durable_s = max(stall_s, min(stall_s * math.exp(rng.uniform(0, math.log(20))), mtbf_s / 10))
    restart_s = min(math.exp(rng.uniform(math.log(30), math.log(1200))), mtbf_s / 4)
    scenario = Scenario(
        name=f"cluster {number}", gpus=gpus, days=max(30.0, lives * mtbf_s / DAY_S), step_s=1.0,
        save=SavingCosts(stall_s=stall_s, durable_s=durable_s), restart=Restarting(base_s=restart_s, per_gpu_s=0.0),
        failure=(Failing(name="failure", kind="killed", per_day=DAY_S / mtbf_s, takes_nodes=0, broken=0.0, detect_s=0.0),),
    )  # fmt: skip
    return Cluster(scenario, mtbf_s, off)


def compare(
    found: Sequence[Cluster], *, seeds: Sequence[int] = (0,), fixed: Sequence[str] = FIXED, said: Callable[[str], None] = lambda text: None
) -> dict[str, Any]:
    """What adaptive, oracle and fixed schedules lose in each: shares of the time, over all seeds, with the same failures for all."""
    rows: list[dict[str, Any]] = []
    for number, one in enumerate(found):
        lost = lost_by(one.scenario, ("adaptive", "oracle", *fixed), seeds)
        rows.append({
            "mtbf_s": round(one.mtbf_s, 1), "gpus": one.scenario.gpus, "days": round(one.scenario.days, 1),
            "stall_s": round(one.scenario.save.stall_s, 3), "durable_s": round(one.scenario.save.durable_s, 3),
            "restart_s": round(one.scenario.restart.base_s, 1), "lost": lost,
        })  # fmt: skip
        said(f"{number + 1} of {len(found)}: {lost['adaptive'] / lost['oracle'] - 1:+.2%} on the oracle's {lost['oracle']:.4f}")
    mean = {name: float(np.mean([row["lost"][name] for row in rows])) for name in rows[0]["lost"]}
    best = min(fixed, key=mean.__getitem__)
    return {
        "clusters": rows, "mean": mean, "best_fixed": best,
        "over_oracle": mean["adaptive"] / mean["oracle"] - 1,
        "over_oracle_each": [row["lost"]["adaptive"] / row["lost"]["oracle"] - 1 for row in rows],
        "best_fixed_over_oracle": mean[best] / mean["oracle"] - 1,
    }  # fmt: skip


def lost_by(scenario: Scenario, policies: Sequence[str], seeds: Sequence[int]) -> dict[str, float]:
    """The share of the time that each policy loses."""
    bounds = {"adaptive": ",at_most=1d,overhead=0.5"}
    made = [policy_of(f"{text}{bounds.get(text, '')},memory=off,backoff_s=0", text) for text in policies]
    sums = dict.fromkeys(policies, 0.0)
    for seed in seeds:
        chance = draw(scenario, seed)
        for policy in made:
            sums[policy.name] += (1 - simulate(scenario, policy, seed, chance=chance).goodput) / len(seeds)
    return sums
