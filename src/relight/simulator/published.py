"""Results known from closed forms and from publications, with their sources, next to the simulator's results for the
same cases.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np

from relight.cost_model import Costs, waste
from relight.simulator.engine import simulate
from relight.simulator.failure_events import draw, stream
from relight.simulator.machines import Machines
from relight.simulator.policies import policy_of
from relight.simulator.read import read_scenario
from relight.simulator.saves import CheckpointInventory
from relight.simulator.scenario import DAY_S, Failing, Repairing, Restarting, SavingCosts, Scenario

_BARE = "memory=off,backoff_s=0"
AUPY = "Aupy et al., Checkpointing algorithms and fault prediction (2014), table 2"
KOKOLIS = "Kokolis et al., Revisiting reliability (HPCA 2025)"


class PublishedResult(NamedTuple):
    """One number: its known value, the accepted bounds, and the simulated value."""

    what: str
    source: str
    known: str
    least: float
    most: float
    simulated: float
    assumed: str = ""

    @property
    def holds(self) -> bool:
        """Return whether the simulated value is within the bounds."""
        return self.least <= self.simulated <= self.most

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the file of results."""
        return {**self._asdict(), "holds": self.holds}


def bare(
    mtbf_s: float, *, failures: int, stall_s: float, durable_s: float, restart_s: float, down_s: float = 0.0
) -> Scenario:
    """Return a job of one machine that fails at random and needs no replacement: the case of the formulas."""
    failing = Failing(name="failure", kind="killed", per_day=DAY_S / mtbf_s, takes_nodes=0, broken=0.0, detect_s=down_s)
    return Scenario(
        name="bare", gpus=1, gpus_per_node=1, days=min(3650.0, failures * mtbf_s / DAY_S), step_s=1.0, failure=(failing,),
        save=SavingCosts(stall_s=stall_s, durable_s=durable_s), restart=Restarting(base_s=restart_s, per_gpu_s=0.0, memory_s=0.0),
    )  # fmt: skip


def goodput(scenario: Scenario, policy: str, seeds: int = 1) -> float:
    """Return the mean goodput over seeds."""
    parsed = policy_of(policy)
    return float(np.mean([simulate(scenario, parsed, seed).goodput for seed in range(seeds)]))


FORMULAS = (
    (86400.0, 30.0, 30.0, 300.0, 1800),
    (7200.0, 5.0, 60.0, 120.0, 300),
    (7200.0, 0.0, 45.0, 600.0, 60),
    (1800.0, 10.0, 10.0, 60.0, 200),
)
"""MTBF, stall, time until durable, restart, interval: seconds."""


def closed_forms(failures: int = 8_000) -> Iterator[PublishedResult]:
    """Yield the cases in which a formula is exact. The simulator must agree within random error."""
    for mtbf_s, stall_s, durable_s, restart_s, interval_s in FORMULAS:
        scenario = bare(mtbf_s, failures=failures, stall_s=stall_s, durable_s=durable_s, restart_s=restart_s)
        exact = 1 - waste(interval_s, 1 / mtbf_s, Costs(stall_s, durable_s, restart_s))
        label = f"MTBF {mtbf_s:g} s, stall {stall_s:g}, durable {durable_s:g}, restart {restart_s:g}: every {interval_s:g} s"
        measured = goodput(scenario, f"{interval_s - stall_s:.0f}steps,{_BARE}")
        yield PublishedResult(
            label,
            "renewal argument; Daly (2006) where durable = stall",
            f"{exact:.4f}",
            0.99 * exact,
            1.01 * exact,
            measured,
        )
    for period_s, name in PERIODS.items():
        exact = _aupy(period_s)
        measured = goodput(_aupy_scenario(failures), f"{period_s - 600}steps,{_BARE}")
        yield PublishedResult(
            f"{name}'s period, {period_s:,} s: goodput", AUPY, f"{exact:.4f}", 0.99 * exact, 1.01 * exact, measured
        )
    mtbf_s, write_s, back_s = 1000 / 6.5 / 1024 * DAY_S, 300.0, 600.0
    young_s = math.sqrt(2 * mtbf_s * write_s)
    ettr = (1 - (back_s + young_s / 2) / mtbf_s) / (1 + write_s / young_s)
    scenario = bare(mtbf_s, failures=failures, stall_s=write_s, durable_s=write_s, restart_s=back_s)
    measured = goodput(scenario, f"{young_s:.0f}steps,{_BARE}")
    yield PublishedResult(
        "expected ETTR of 8,192 GPUs of RSC-1, writes of 5 min, restarts of 10",
        KOKOLIS,
        f"{ettr:.4f}",
        0.99 * ettr,
        1.01 * ettr,
        measured,
    )


PERIODS = {3604: "Young", 3733: "Daly", 2869: "RFO", 3218: "the best"}


def _aupy_scenario(failures: int) -> Scenario:
    return bare(7519.0, failures=failures, stall_s=600.0, durable_s=600.0, restart_s=600.0, down_s=60.0)


def _aupy(period_s: float) -> float:
    """Return the expected goodput if failures occur during training, saves and recovery, but not while the job is
    down.
    """
    rate = 1 / 7519.0
    return (period_s - 600) / ((1 / rate + 60) * math.exp(600 * rate) * math.expm1(rate * period_s))


def best_period(failures: int = 8_000, seeds: int = 2) -> PublishedResult:
    """Return the period with the highest goodput: the maximum of a cubic fit over simulated periods that all meet the
    same failures.
    """
    periods = (2000, 2400, 2869, 3218, 3604, 4200, 5000)
    scenario = _aupy_scenario(failures)
    goodputs = np.zeros(len(periods))
    for seed in range(seeds):
        chance = draw(scenario, seed)
        goodputs += [
            simulate(scenario, policy_of(f"{period - 600}steps,{_BARE}"), seed, chance=chance).goodput / seeds
            for period in periods
        ]
    logs = np.log(periods)
    curve = np.polyfit(logs, goodputs, 3)
    fine = np.linspace(logs[0], logs[-1], 2001)
    best = float(np.exp(fine[np.argmax(np.polyval(curve, fine))]))
    return PublishedResult(
        "the best period, MTBF 7,519 s, C = R = 600 s, D = 60 s",
        AUPY,
        "3,218 s",
        0.95 * 3218,
        1.05 * 3218,
        best,
        "bounds of 5 %: it is flat",
    )


def mttf(gpus: int, known: str, least: float, most: float) -> PublishedResult:
    """Return the mean time between failures, in hours, of a job at RSC-1's failure rate."""
    failing = Failing(name="hardware", per_million_gpu_hours=6.5 / 1000 / 8 / 24 * 1e6, broken=0.0, detect_s=0.0)
    scenario = Scenario(
        gpus=gpus, days=max(20.0, 60 * 16384 / gpus), failure=(failing,), restart=Restarting(base_s=0.0, per_gpu_s=0.0)
    )
    policy = policy_of("2m,node_failures=1000,backoff_s=0")
    counts = [sum(simulate(scenario, policy, seed).failures.values()) for seed in range(4)]
    return PublishedResult(
        f"mean time to failure of {gpus:,} GPUs, hours",
        KOKOLIS,
        known,
        least,
        most,
        24 * scenario.days / float(np.mean(counts)),
        "6.50 failures in 1,000 node-days, the paper's",
    )


def ettr(per_1000_node_days: float, write_s: float) -> PublishedResult:
    """Return the effective training time ratio of 12,000 GPUs. The paper names two ways to reach 0.9."""
    mtbf_s = DAY_S / (1500 * per_1000_node_days / 1000)
    scenario = bare(mtbf_s, failures=6000, stall_s=write_s, durable_s=write_s, restart_s=300.0)
    label = f"ETTR of 12,000 GPUs at {per_1000_node_days:g} failures in 1,000 node-days, writes of {write_s:g} s"
    measured = goodput(scenario, f"young,{_BARE}")
    return PublishedResult(
        label, KOKOLIS, "0.9", 0.85, 0.95, measured, "restarts of 5 min (the paper's 5 to 20); its one digit"
    )


def llama() -> Iterator[PublishedResult]:
    """Yield the results of the shipped scenario ``llama3-54-days`` with an adaptive schedule."""
    scenario, policy = read_scenario("llama3-54-days"), policy_of("adaptive,last=3,hourly=8")
    outcomes = [simulate(scenario, policy, seed) for seed in range(5)]
    source = "Llama Team, The Llama 3 Herd of Models (2024), section 3.3.4 and table 5"
    count = float(np.mean([sum(outcome.failures.values()) for outcome in outcomes]))
    bounds = 2 * math.sqrt(419)
    yield PublishedResult(
        "interruptions in 54 days",
        source,
        "419",
        419 - bounds,
        419 + bounds,
        count,
        "bounds: two standard deviations of such a count",
    )
    share = float(np.mean([outcome.goodput for outcome in outcomes]))
    yield PublishedResult(
        "effective training time",
        source,
        "above 0.9",
        0.9,
        1.0,
        share,
        "stall 1 s, restarts of 200 s (FT-HSDP): not in the paper",
    )


def hundred_thousand() -> PublishedResult:
    """Return the minutes between failures of any cause in the shipped scenario ``a-hundred-thousand``."""
    scenario = read_scenario("a-hundred-thousand")
    counts = [len(draw(scenario, seed).failures) for seed in range(5)]
    minutes = scenario.days * 1440 / float(np.mean(counts))
    source = "Training LLMs with fault tolerant HSDP on 100,000 GPUs (arXiv 2602.00277)"
    return PublishedResult(
        "minutes between failures of 98,304 GPUs, all causes",
        source,
        "18",
        17.5,
        18.5,
        minutes,
        "its causes at 32K, scaled to its rate at 98K",
    )


def megascale() -> Iterator[PublishedResult]:
    """Yield the results of four weeks on 12,288 GPUs."""
    failing = Failing(
        name="failure", kind="killed", per_million_gpu_hours=19.7, takes_nodes=0, broken=0.0, detect_s=60.0
    )
    scenario = Scenario(gpus=12288, days=28, failure=(failing,), restart=Restarting(base_s=480.0, per_gpu_s=0.0))
    outcomes = [simulate(scenario, policy_of("10m,memory=off,last=2"), seed) for seed in range(5)]
    source, assumed = (
        "Jiang et al., MegaScale (NSDI 2024)",
        "Llama 3's rate; four weeks; saves every 10 min, restarts of 9: within its 15 min",
    )
    recoveries = float(np.mean([sum(outcome.failures.values()) for outcome in outcomes]))
    yield PublishedResult("recoveries in several weeks", source, "over 100", 100, 250, recoveries, assumed)
    yield PublishedResult(
        "effective training time",
        source,
        "above 0.9",
        0.9,
        1.0,
        float(np.mean([outcome.goodput for outcome in outcomes])),
        assumed,
    )


def pairs(nodes: int, known: str, least: float, most: float) -> PublishedResult:
    """Return the share of pairs of machines that can be lost at once while peers' memory keeps a copy.

    The rings are computed by the product's own code.
    """
    scenario, policy = Scenario(gpus=8 * nodes, nodes_per_rack=1), policy_of("10m,copies=1")
    survived = []
    for lost in itertools.combinations(range(nodes), 2):
        shelf = CheckpointInventory(scenario, policy)
        save = shelf.new(0, 1.0, 0.0, wrong=False)
        shelf.protect(save)
        survived.append(shelf.best(lost, None)[0] == 1.0)
    label = f"two of {nodes} machines lost at once: come back from peers' memory"
    return PublishedResult(
        label,
        "Wang et al., Gemini (SOSP 2023), corollary 1",
        known,
        least,
        most,
        float(np.mean(survived)),
        "all pairs, one copy",
    )


def repairs() -> Iterator[PublishedResult]:
    """Yield the median and the mean duration of repairs, in minutes."""
    scenario = Scenario(gpus=8, repair=Repairing())
    rng = stream(0, "repairs")
    scenario_dice = draw(Scenario(gpus=8, days=30, failure=(Failing(name="f", per_day=1.0),)), 0).failures[0]
    minutes = []
    for z in rng.standard_normal(200_000).tolist():
        machines = Machines(scenario, policy_of("10m"), frozenset())
        minutes += [seconds / 60 for _, seconds in machines.send_away((0,), 0.0, scenario_dice._replace(z_repair=z))]
    source = "Schroeder and Gibson, A large-scale study of failures (DSN 2006), LANL"
    yield PublishedResult(
        "median repair, minutes",
        source,
        "54",
        53.5,
        54.5,
        float(np.median(minutes)),
        "lognormal, sigma 1.94 from the two",
    )
    yield PublishedResult(
        "mean repair, minutes",
        source,
        "355",
        0.95 * 355,
        1.05 * 355,
        float(np.mean(minutes)),
        "bounds of 5 %: it is a heavy tail",
    )


def restarts() -> PublishedResult:
    """Return the number of restarts in the shipped scenario ``opt-175b``."""
    scenario = read_scenario("opt-175b")
    counts = [sum(simulate(scenario, policy_of("3h,last=2,memory=off"), seed).failures.values()) for seed in range(10)]
    mean, bounds = float(np.mean(counts)), 2 * math.sqrt(105)
    return PublishedResult(
        "restarts in two months",
        "Zhang et al., OPT (2022)",
        "over 105 (35 by hand)",
        105 - bounds,
        105 + bounds,
        mean,
        "two standard deviations",
    )


PUBLISHED: tuple[Callable[[], PublishedResult | Iterator[PublishedResult]], ...] = (
    best_period, lambda: mttf(16384, "1.8", 1.75, 1.85), lambda: mttf(131072, "0.23", 0.225, 0.235), lambda: ettr(6.5, 10.0),
    lambda: ettr(1.0, 300.0), llama, hundred_thousand, megascale, lambda: pairs(16, "0.933", 0.9325, 0.9335),
    lambda: pairs(128, "0.992", 0.9915, 0.9925), repairs, restarts,
)  # fmt: skip


def published() -> Iterator[PublishedResult]:
    """Yield the comparison with every published result."""
    for produce in PUBLISHED:
        results = produce()
        yield from [results] if isinstance(results, PublishedResult) else results


def speed() -> dict[str, float]:
    """Return the CPU seconds of a simulation of each size for which the documentation promises a speed."""
    import time

    seconds = {}
    for name, days in (("llama3-54-days", 54.0), ("a-hundred-thousand", 90.0)):
        scenario = read_scenario(name, {"days": days})
        began = time.process_time()
        simulate(scenario, policy_of("adaptive,last=3,hourly=8"), 0)
        seconds[f"{scenario.gpus:,} GPUs, {days:g} days"] = round(time.process_time() - began, 2)
    return seconds
