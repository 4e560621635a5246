"""Random clusters that fail, and what a schedule loses on them: saves, lost work and restarts, life by life."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass

from relight.cost_model import Costs, IntervalBounds, ScheduleDecision, ScheduleInput, best_interval, decide

HOUR, DAY = 3600.0, 86400.0
FIXED_S = (60.0, 300.0, 600.0, 1800.0, HOUR, 2 * HOUR, 4 * HOUR)


@dataclass(frozen=True)
class Cluster:
    """A cluster: its mean time between failures, the costs of saves and restarts, and its stated number of devices."""

    mtbf_s: float
    costs: Costs
    devices: int
    seed: int

    def lives(self, count: int) -> list[float]:
        """Uptimes between failures: the same for every schedule."""
        pick = random.Random(self.seed)
        return [pick.expovariate(1 / self.mtbf_s) for _ in range(count)]


def clusters(count: int, seed: int) -> list[Cluster]:
    """Return clusters with 10 minutes to 10 days between failures, independent of their number of devices."""
    pick = random.Random(seed)
    result = []
    for number in range(count):
        mtbf_s = math.exp(pick.uniform(math.log(600), math.log(10 * DAY)))
        stall_s = math.exp(pick.uniform(math.log(0.05), math.log(min(60, mtbf_s / 50))))
        durable_s = stall_s * pick.uniform(1, 4)
        result.append(
            Cluster(
                mtbf_s,
                Costs(stall_s, durable_s, pick.uniform(0.01, 0.1) * min(mtbf_s, HOUR)),
                2 ** pick.randint(0, 16),
                number,
            )
        )
    return result


Chooser = Callable[[float, int, float], float]
"""Watched seconds, failures, and uptime of this life to the interval from now on."""


def lost(cluster: Cluster, lives: list[float], choose: Chooser) -> float:
    """Return the lost share of time. Decisions come at growing distances, and saves between them are even."""
    costs, useful, spent, watched = cluster.costs, 0.0, 0.0, 0.0
    for number, uptime in enumerate(lives):
        age, kept, decide_at = 0.0, 0.0, 0.0
        while age < uptime:
            interval = choose(watched + age, number, age)
            decide_at = max(2 * age, 60 * interval)
            until = min(decide_at, uptime)
            saves = math.floor((until - age) / interval)
            if until == uptime:  # only saves that are durable at the failure count
                saves = max(0, math.floor((uptime - age - costs.durable_s + costs.stall_s) / interval))
            kept += saves * (interval - costs.stall_s)
            age = uptime if until == uptime else age + max(1, saves) * interval
        useful += kept
        watched += uptime
        spent += uptime + costs.restart_s
    return 1 - useful / spent


def adaptive(cluster: Cluster, bounds: IntervalBounds) -> Chooser:
    """Return the schedule of ``relight.adaptive()``, which knows only what a run can measure."""
    before: list[ScheduleDecision | None] = [None]

    def choose(watched_s: float, failures: int, at: float) -> float:
        costs = cluster.costs
        seen = ScheduleInput(
            step_s=0.01,
            stalls_s=(costs.stall_s,),
            durables_s=(costs.durable_s,),
            restarts_s=(costs.restart_s,) if failures else (),
            devices=cluster.devices,
            failures=failures,
            watched_s=watched_s,
        )
        before[0] = decide(seen, before[0], bounds)
        return before[0].interval_s

    return choose


def oracle(cluster: Cluster) -> Chooser:
    """Knows the true rate from the start."""
    seconds = best_interval(1 / cluster.mtbf_s, cluster.costs, at_least_s=cluster.costs.durable_s).seconds
    return lambda watched_s, failures, at: seconds


def fixed(cluster: Cluster, seconds: float) -> Chooser:
    """A fixed interval that the user chose. A save that takes longer delays the next one."""
    return lambda watched_s, failures, at: max(seconds, cluster.costs.durable_s)
