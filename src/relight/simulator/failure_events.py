"""Failures of a fleet, drawn from a seed before the simulation: identical for every policy.

Each random process has a random stream of its own, and each event carries all random numbers that its handling may
need. So two policies meet the same failures at the same times, with the same repairs, and their results differ only
by what the policies did.
"""

from __future__ import annotations

import math
import zlib
from typing import Any, NamedTuple

import numpy as np

from relight.simulator.scenario import HOUR_S, Failing, Scenario

LEMON, SILENT = "lemon", "silent"
ANY = -1


class FailureEvent(NamedTuple):
    """A failure of the fleet; it has no effect while the job is down.

    Fields ``u_``: uniform in [0, 1); ``e_``: exponential; ``z_``: normal.
    """

    at: float
    cause: str
    failing: int
    """Index in the scenario's ``failure``; −1: a lemon's failure, or a silent one."""
    machine: int
    """The lemon; −1: ``u_node`` picks the machine."""
    u_node: float
    u_broken: float
    u_foreseen: float
    u_cured: float
    e_lead: float
    z_repair: float
    z_restart: float


class Chance(NamedTuple):
    """All failure events, in order of time, and the machines that are lemons."""

    failures: tuple[FailureEvent, ...]
    lemons: frozenset[int]


class Calendar(NamedTuple):
    """Given failures, as of a recorded run, instead of drawn ones: seconds, and index in the scenario's ``failure``."""

    at: tuple[float, ...]
    failing: tuple[int, ...]


def stream(seed: int, *what: object) -> np.random.Generator:
    """Return the random generator of one process. The same words give the same numbers on any machine."""
    return np.random.default_rng([seed, *(zlib.crc32(str(word).encode()) for word in what)])


def draw(scenario: Scenario, seed: int, calendar: Calendar | None = None) -> Chance:
    """Return the failures of ``scenario`` with this seed."""
    failures: list[FailureEvent] = []
    for number, failing in enumerate(scenario.failure):
        if calendar is None:
            rng = stream(seed, "failure", failing.name)
            failures += _failure_events(
                rng, _times(rng, scenario.rate_per_s(failing), scenario.wall_s, failing), failing.name, number
            )
        else:
            times = np.array(
                [time for time, which in zip(calendar.at, calendar.failing, strict=True) if which == number]
            )
            failures += _failure_events(stream(seed, "failure", failing.name), times, failing.name, number)
    lemons = _lemons(scenario, seed)
    for machine in sorted(lemons):
        rng = stream(seed, LEMON, machine)
        times = _times(rng, 1 / (scenario.lemons.mtbf_hours * HOUR_S), scenario.wall_s)
        failures += _failure_events(rng, times, LEMON, ANY, machine)
    rng = stream(seed, SILENT)
    silent = scenario.silent.per_million_gpu_hours * scenario.gpus / 1e6 / HOUR_S
    failures += _failure_events(rng, _times(rng, silent, scenario.wall_s), SILENT, ANY)
    return Chance(tuple(sorted(failures)), lemons)


def _lemons(scenario: Scenario, seed: int) -> frozenset[int]:
    rng = stream(seed, "lemons")
    machines = scenario.nodes + scenario.spares
    count = int(rng.binomial(machines, scenario.lemons.share))
    return frozenset(int(machine) for machine in rng.choice(machines, size=count, replace=False))


def _times(
    rng: np.random.Generator, per_s: float, until: float, failing: Failing | None = None
) -> np.ndarray[Any, Any]:
    if not per_s:
        return np.empty(0)
    shape = failing.shape if failing is not None else 1.0
    scale = 1 / per_s / math.gamma(1 + 1 / shape)
    batches, last = [], 0.0
    while last < until:
        count = int(until * per_s * 1.1) + 50
        gaps = scale * rng.weibull(shape, size=count)
        times = last + np.cumsum(gaps)
        batches.append(times)
        last = float(times[-1])
    first = np.concatenate(batches)
    first = first[first < until]
    return (
        first if failing is None or not failing.aftershock else np.sort(np.array(_shaken(rng, first, failing, until)))
    )


def _shaken(rng: np.random.Generator, first: np.ndarray[Any, Any], failing: Failing, until: float) -> list[float]:
    """Return the times with their aftershocks, and the aftershocks of those."""
    times = list(first)
    for time in times:  # which grows meanwhile
        if rng.random() < failing.aftershock and (aftershock := time + rng.exponential(failing.aftershock_s)) < until:
            times.append(aftershock)
    return times


def _failure_events(
    rng: np.random.Generator, times: np.ndarray[Any, Any], cause: str, failing: int, machine: int = ANY
) -> list[FailureEvent]:
    count = len(times)
    dice = [
        *rng.random((4, count)).tolist(),
        rng.exponential(size=count).tolist(),
        *rng.standard_normal((2, count)).tolist(),
    ]
    return [FailureEvent(time, cause, failing, machine, *row) for time, *row in zip(times.tolist(), *dice, strict=True)]
