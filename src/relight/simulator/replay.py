"""A recorded run as a scenario: its own failures, step times and recoveries replace the random ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median
from typing import Any, NamedTuple

from relight.errors import CheckpointNotFound, ConfigError
from relight.log.identity import seconds_since_epoch
from relight.simulator.failure_events import Calendar
from relight.simulator.read import put, scenario_of
from relight.simulator.scenario import DAY_S, Scenario
from relight.supervise.goodput import TRAINING, Account, merged
from relight.supervise.incidents import Incident, once_each
from relight.units import percent_text

_LEFT_OUT = ("fenced",)
_ENDED = ("end",)


class Recorded(NamedTuple):
    """Facts from the records of a run that the simulator needs."""

    name: str
    seconds: float
    step_s: float
    ranks: int
    goodput: float
    failures: tuple[tuple[float, str, bool], ...]
    """(seconds since the run began, without the time between its jobs; kind of failure; whether a machine left the
    job).
    """
    noticed_s: float
    """Median seconds until a failure was noticed."""
    back_s: float
    """Median seconds from the detection of a failure to the next step."""


def recorded_of(name: str, incidents: Sequence[Incident], accounts: Sequence[Account]) -> Recorded:
    """Return the records of ``relight incidents`` and ``relight goodput``.

    Raise ``CheckpointNotFound`` if they do not suffice for a replay.
    """
    hint = "relight run writes it; relight goodput RUN shows it"
    if not accounts:
        raise CheckpointNotFound("no job of this run was watched over", where=name, hint=hint)
    whole = merged(list(accounts))
    training_s = whole.spent.get(TRAINING, 0.0)
    if whole.steps < 1 or not (0 < training_s < math.inf and 0 < whole.seconds < math.inf):
        raise CheckpointNotFound("its record has no steps, so the duration of a step is unknown", where=name, hint=hint)
    relevant = [
        incident
        for incident in once_each(list(incidents))
        if incident.kind not in _LEFT_OUT and incident.action not in _ENDED
    ]
    parts = [
        incident.after.seconds
        for incident in relevant
        if incident.after is not None and incident.after.seconds.get("all", 0.0) > 0
    ]
    noticed = median(incident.get("noticed", 0.0) for incident in parts) if parts else 0.0
    back = median(incident["all"] for incident in parts) - noticed if parts else 0.0
    ranks = 1 + max((int(worker.get("rank", 0)) for incident in relevant for worker in incident.workers), default=0)
    failures = tuple(
        sorted((_offset(incident, accounts), incident.kind, incident.action == "exclude_node") for incident in relevant)
    )
    return Recorded(
        name, whole.seconds, training_s / whole.steps, ranks, whole.goodput, failures, max(0.0, noticed), max(0.0, back)
    )  # fmt: skip


def replayed(recorded: Recorded, settings: dict[str, Any] | None = None) -> tuple[Scenario, Calendar]:
    """Return the scenario and its failures.

    ``settings`` override recorded values. The cost of saves is not recorded.
    """
    kinds = sorted({(kind, left) for _, kind, left in recorded.failures})
    failing: list[dict[str, Any]] = [
        {
            "name": f"{kind}, left" if left else kind,
            "kind": kind,
            "takes_nodes": int(left or kind == "hardware"),
            "broken": float(left),
            "detect_s": recorded.noticed_s,
        }
        for kind, left in kinds
    ]
    values: dict[str, Any] = {
        "name": recorded.name[:40] or "replay",
        "about": f"recorded: goodput {percent_text(recorded.goodput)}, {len(recorded.failures)} failures",
        "gpus": max(1, recorded.ranks),
        "days": recorded.seconds / DAY_S,
        "step_s": min(max(recorded.step_s, 0.001), DAY_S),
        "save": {"stall_s": 0.0, "durable_s": 1.0},
        "restart": {"base_s": recorded.back_s, "per_gpu_s": 0.0, "memory_s": 0.0},
        "failure": failing,
    }
    for path, value in (settings or {}).items():
        if path == "days" and value > values["days"]:
            raise ConfigError(
                f"only {values['days']:.4g} days are recorded, not {value:g}",
                where=recorded.name,
                hint="leave --days out",
            )
        put(values, path, value)
    scenario = scenario_of(values, recorded.name)
    times = tuple(failed_at for failed_at, _, _ in recorded.failures)
    return scenario, Calendar(times, tuple(kinds.index((kind, left)) for _, kind, left in recorded.failures))


def _offset(incident: Incident, accounts: Sequence[Account]) -> float:
    """Return the incident's time in seconds of the run's own time: the durations of its jobs, without the gaps
    between them.
    """
    time, passed, best = seconds_since_epoch(incident.at) or 0.0, 0.0, 0.0
    for account in accounts:
        began = seconds_since_epoch(account.began) or 0.0
        if time >= began:
            best = passed + min(time - began, account.seconds)
        passed += account.seconds
    return best
