"""A run that was recorded, as a scenario: its failures, steps and ways back in the place of chance."""

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

_LEFT_OUT = ("fenced",)
_ENDED = ("end",)


class Recorded(NamedTuple):
    """What the records of a run tell."""

    name: str
    seconds: float
    step_s: float
    ranks: int
    goodput: float
    failures: tuple[tuple[float, str, bool], ...]
    """When, since it began and without the time between its jobs; of which kind; whether a machine left."""
    noticed_s: float
    """Until a failure was noticed: the median."""
    back_s: float
    """From there to the first step again."""


def recorded_of(name: str, incidents: Sequence[Incident], accounts: Sequence[Account]) -> Recorded:
    """Of ``relight incidents`` and ``relight goodput``. ``CheckpointNotFound`` if there is too little to replay."""
    hint = "relight run writes it; relight goodput RUN shows it"
    if not accounts:
        raise CheckpointNotFound("no job of this run was watched over", where=name, hint=hint)
    whole = merged(list(accounts))
    training_s = whole.spent.get(TRAINING, 0.0)
    if whole.steps < 1 or not (0 < training_s < math.inf and 0 < whole.seconds < math.inf):
        raise CheckpointNotFound("its record has no steps, so nobody knows how long one takes", where=name, hint=hint)
    told = [one for one in once_each(list(incidents)) if one.kind not in _LEFT_OUT and one.action not in _ENDED]
    parts = [one.after.seconds for one in told if one.after is not None and one.after.seconds.get("all", 0.0) > 0]
    noticed = median(one.get("noticed", 0.0) for one in parts) if parts else 0.0
    back = median(one["all"] for one in parts) - noticed if parts else 0.0
    ranks = 1 + max((int(worker.get("rank", 0)) for one in told for worker in one.workers), default=0)
    failures = tuple(sorted((_offset(one, accounts), one.kind, one.action == "exclude_node") for one in told))
    return Recorded(
        name, whole.seconds, training_s / whole.steps, ranks, whole.goodput, failures, max(0.0, noticed), max(0.0, back)
    )  # fmt: skip


def replayed(recorded: Recorded, settings: dict[str, Any] | None = None) -> tuple[Scenario, Calendar]:
    """The scenario, and when what fails. ``settings`` count in place of what was recorded; what saves cost is not recorded."""
    kinds = sorted({(kind, left) for _, kind, left in recorded.failures})
    failing: list[dict[str, Any]] = [
        {
            "name": f"{kind}, left" if left else kind, "kind": kind, "takes_nodes": int(left or kind == "hardware"), "broken": float(left),
            "detect_s": recorded.noticed_s,
        }
        for kind, left in kinds
    ]  # fmt: skip
    told: dict[str, Any] = {
        "name": recorded.name[:40] or "replay",
        "about": f"as it was recorded: goodput {100 * recorded.goodput:.1f} %, {len(recorded.failures)} failures",
        "gpus": max(1, recorded.ranks),
        "days": recorded.seconds / DAY_S,
        "step_s": min(max(recorded.step_s, 0.001), DAY_S),
        "save": {"stall_s": 0.0, "durable_s": 1.0},
        "restart": {"base_s": recorded.back_s, "per_gpu_s": 0.0, "memory_s": 0.0},
        "failure": failing,
    }
    for path, value in (settings or {}).items():
        if path == "days" and value > told["days"]:
            raise ConfigError(f"only {told['days']:.4g} days are recorded, not {value:g}", where=recorded.name, hint="leave --days out")
        put(told, path, value)
    scenario = scenario_of(told, recorded.name)
    at = tuple(at for at, _, _ in recorded.failures)
    return scenario, Calendar(at, tuple(kinds.index((kind, left)) for _, kind, left in recorded.failures))


def _offset(one: Incident, accounts: Sequence[Account]) -> float:
    """Seconds of the run's own time, in which one job begins where the one before has ended."""
    at, passed, best = seconds_since_epoch(one.at) or 0.0, 0.0, 0.0
    for account in accounts:
        began = seconds_since_epoch(account.began) or 0.0
        if at >= began:
            best = passed + min(at - began, account.seconds)
        passed += account.seconds
    return best
