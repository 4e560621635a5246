"""What befalls a fleet, drawn from a seed before anything is simulated: the same for whichever policy is looked at.

Each process has a stream of its own, and each blow carries all the dice that may ever be thrown for it. So two policies meet the same
failures at the same times, with the same repairs behind them, and what differs between them is what they did.
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
    """Something that happens to the fleet, if its machines are at work then. The last fields are dice: from 0 to 1, or normal."""

    at: float
    cause: str
    failing: int
    """Which of the scenario's ``failure``; −1: a lemon's, or silent."""
    machine: int
    """A lemon's own; −1: whichever ``u_node`` picks."""
    u_node: float
    u_broken: float
    u_foreseen: float
    u_cured: float
    e_lead: float
    z_repair: float
    z_restart: float


class Chance(NamedTuple):
    """All of it, in order of time."""

    blows: tuple[FailureEvent, ...]
    lemons: frozenset[int]


class Calendar(NamedTuple):
    """Failures that are given, as by a recorded run, in place of those that are drawn: when, as which of the scenario's ``failure``."""

    at: tuple[float, ...]
    failing: tuple[int, ...]


def stream(seed: int, *what: object) -> np.random.Generator:
    """Of one process. The same words, the same numbers, on any machine."""
    return np.random.default_rng([seed, *(zlib.crc32(str(one).encode()) for one in what)])


def draw(scenario: Scenario, seed: int, calendar: Calendar | None = None) -> Chance:
    """What befalls ``scenario`` with this seed."""
    blows: list[FailureEvent] = []
    for number, one in enumerate(scenario.failure):
        if calendar is None:
            rng = stream(seed, "failure", one.name)
            blows += _blows(rng, _times(rng, scenario.rate_per_s(one), scenario.wall_s, one), one.name, number)
        else:
            times = np.array([at for at, which in zip(calendar.at, calendar.failing, strict=True) if which == number])
            blows += _blows(stream(seed, "failure", one.name), times, one.name, number)
    lemons = _lemons(scenario, seed)
    for machine in sorted(lemons):
        rng = stream(seed, LEMON, machine)
        times = _times(rng, 1 / (scenario.lemons.mtbf_hours * HOUR_S), scenario.wall_s)
        blows += _blows(rng, times, LEMON, ANY, machine)
    rng = stream(seed, SILENT)
    silent = scenario.silent.per_million_gpu_hours * scenario.gpus / 1e6 / HOUR_S
    blows += _blows(rng, _times(rng, silent, scenario.wall_s), SILENT, ANY)
    return Chance(tuple(sorted(blows)), lemons)


def _lemons(scenario: Scenario, seed: int) -> frozenset[int]:
    rng = stream(seed, "lemons")
    machines = scenario.nodes + scenario.spares
    count = int(rng.binomial(machines, scenario.lemons.share))
    return frozenset(int(one) for one in rng.choice(machines, size=count, replace=False))


def _times(rng: np.random.Generator, per_s: float, until: float, one: Failing | None = None) -> np.ndarray[Any, Any]:
    if not per_s:
        return np.empty(0)
    shape = one.shape if one is not None else 1.0
    scale = 1 / per_s / math.gamma(1 + 1 / shape)
    found, last = [], 0.0
    while last < until:
        count = int(until * per_s * 1.1) + 50
        gaps = scale * rng.weibull(shape, size=count)
        times = last + np.cumsum(gaps)
        found.append(times)
        last = float(times[-1])
    first = np.concatenate(found)
    first = first[first < until]
    return first if one is None or not one.aftershock else np.sort(np.array(_shaken(rng, first, one, until)))


def _shaken(rng: np.random.Generator, first: np.ndarray[Any, Any], one: Failing, until: float) -> list[float]:
    """With what follows each of them, and what follows that."""
    found = list(first)
    for at in found:  # which grows meanwhile
        if rng.random() < one.aftershock and (then := at + rng.exponential(one.aftershock_s)) < until:
            found.append(then)
    return found


def _blows(rng: np.random.Generator, times: np.ndarray[Any, Any], cause: str, failing: int, machine: int = ANY) -> list[FailureEvent]:
    count = len(times)
    dice = [*rng.random((4, count)).tolist(), rng.exponential(size=count).tolist(), *rng.standard_normal((2, count)).tolist()]
    return [FailureEvent(at, cause, failing, machine, *row) for at, *row in zip(times.tolist(), *dice, strict=True)]
