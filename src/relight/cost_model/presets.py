"""Settings for kinds of machines.

Each preset has a plan's numbers, written as a ``relight.toml`` with the reason of every line.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from relight.cost_model.planned import JobPlan, ParallelLayout, Question, plan
from relight.cost_model.rates import prior
from relight.cost_model.sizing import from_count, size_of
from relight.errors import ConfigError
from relight.units import duration_text, percent_text, size_text

NOTICED_STEPS = 5000
"""Most steps for which damage to a model was observed to go unnoticed (docs/planning.md)."""
WORSE = 4.0
"""The longest interval is still good if failures are so many times as frequent as published: 3.6 times was measured (RSC, 1,024 GPUs)."""
GAIN = 0.0005
"""Peers are worth their memory from this much goodput on."""
LOST_MAX_S = 4 * 3600.0
"""Most seconds of work that one failure may cost, whatever the plan computes.

A loss of a day of work is not acceptable.
"""
COPIES, KEYS = "s3://BUCKET/runs", "/etc/relight"
"""Placeholders in a file. The user replaces them by real places."""
PATIENCE = 3.0
"""Factor from an expected value to its limit."""


@dataclass(frozen=True, slots=True)
class PresetScenario:
    """The kind of machine that a preset is for, and its priorities."""

    summary: str
    model: str
    gpus: int
    per_node: int = 8
    slack: float = 0.005
    """Share of time that may be lost beyond the optimum. It determines the longest interval."""
    overhead: float = 0.02
    kept: int = 3
    sparing: bool = False
    """Little memory, few cores."""
    cheap: bool = False
    """Storage and idle processes cost more than some lost time."""
    lasting: bool = False
    """Trained checkpoints must stay available for months."""
    peers: bool = True
    guarded: bool = False
    """Encrypted, signed, audited, with alerts and copies in another place."""


SCENARIOS = {
    "small": PresetScenario("one machine: up to a billion parameters, up to 8 GPUs", "1B", 8, peers=False),
    "medium": PresetScenario("a few machines: 8 billion parameters on 64 GPUs", "8B", 64),
    "large": PresetScenario("many machines: 70 billion parameters on 1,024 GPUs", "70B", 1024, kept=5),
    "high-performance": PresetScenario(
        "as little lost as can be: 70 billion parameters on 1,024 GPUs", "70B", 1024, slack=0.001, overhead=0.01
    ),
    "large-model": PresetScenario(
        "the largest: 405 billion parameters on 16,384 GPUs", "405B", 16384, slack=0.002, overhead=0.01, kept=5
    ),
    "cost-efficient": PresetScenario(
        "few bytes kept, nothing idle: 8 billion parameters on 64 GPUs",
        "8B",
        64,
        slack=0.02,
        kept=2,
        cheap=True,
        peers=False,
    ),
    "resource-constrained": PresetScenario(
        "one GPU in a machine with little memory and few cores",
        "1B",
        1,
        1,
        slack=0.02,
        kept=2,
        sparing=True,
        peers=False,
    ),
    "enterprise": PresetScenario(
        "checkpoints that last, encrypted, signed and copied: 70 billion parameters on 512 GPUs",
        "70B",
        512,
        kept=5,
        lasting=True,
        guarded=True,
    ),
}


@dataclass(frozen=True, slots=True)
class PresetLine:
    """One setting, and why it is what it is."""

    table: str
    key: str
    value: str | int | float | bool | tuple[str, ...]
    why: str


@dataclass(frozen=True, slots=True)
class Preset:
    """Settings, and the plan that they follow from."""

    name: str
    summary: str
    model: str
    plan: JobPlan
    lines: tuple[PresetLine, ...]
    first: tuple[str, ...] = ()
    """Actions before the first start, one line each."""

    def toml(self) -> str:
        """Return the text of ``relight.toml``."""
        plan = self.plan
        layout, levels = plan.question.layout, "" if "peers" in plan.question.levels else " --levels memory,store"
        head = [
            f"# relight config preset {self.name}: {self.summary}",
            f"# Expected: goodput {percent_text(plan.goodput, 2)}; {size_text(self.memory_bytes)} of each node's memory for snapshots.",
            f"# Computed by: relight plan {self.model} --gpus {layout.gpus} --per-node {layout.per_node}{levels}",
        ]
        if self.first:
            head += ["#", "# Before the first start:", *(f"# {action}" for action in self.first)]
        table = ""
        for line in self.lines:
            if line.table != table:
                head += ["", f"[{line.table}]"]
                table = line.table
            head.append(f"{line.key} = {_value(line.value)}  # {line.why}")
        return "\n".join(head) + "\n"

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of a node's memory that snapshots take: the plan's number, or the limit in the file."""
        layout = self.plan.question.layout
        limit = next(
            (line.value for line in self.lines if (line.table, line.key) == ("checkpoint.limits", "memory")), None
        )
        own = limit * min(layout.gpus, layout.per_node) if isinstance(limit, int) else None
        return self.plan.host_bytes if own is None else min(own, self.plan.host_bytes)


def preset(
    name: str,
    *,
    model: str | None = None,
    gpus: int | None = None,
    per_node: int | None = None,
    copies: str = "",
    keys: str = "",
) -> Preset:
    """Return one of ``SCENARIOS``, or its variant for another model or another number of GPUs.

    ``copies`` and ``keys``: where a preset that guards what it stores keeps copies, the audit log and its keys.
    """
    scenario = SCENARIOS.get(name)
    if scenario is None:
        raise ConfigError(f"there is no preset {name[:40]!r}", hint=f"one of {', '.join(SCENARIOS)}")
    model, gpus = model or scenario.model, gpus or scenario.gpus
    layout = ParallelLayout(gpus, per_node or scenario.per_node)
    question = Question(
        size=size_of(from_count(model)),
        layout=layout,
        belief=prior(gpus),
        rate_source=f"published rates of {gpus:,} GPUs",
        levels=("memory", "store"),
        kept=scenario.kept,
    )
    planned = plan(question)
    if scenario.peers and layout.nodes > 1:
        protected = plan(replace(question, levels=("memory", "peers", "store")))
        if protected.goodput - planned.goodput >= GAIN or scenario.guarded:
            planned = protected
    description = (
        scenario.summary
        if (model, gpus) == (scenario.model, scenario.gpus)
        else f"{scenario.summary.partition(':')[0]}; here {model} on {gpus:,} GPUs"
    )
    copies, keys = (copies or COPIES).rstrip("/"), (keys or KEYS).rstrip("/")
    lines = [
        *_schedule(scenario, planned), *_keeping(scenario, planned), *_resources(scenario, planned), *_copies(scenario, planned, copies),
        *_watching(scenario, planned), *_guarding(scenario, copies, keys),
    ]  # fmt: skip
    return Preset(name, description, model, planned, tuple(lines), _first(copies, keys) if scenario.guarded else ())


def _schedule(scenario: PresetScenario, job_plan: JobPlan) -> list[PresetLine]:
    durable_s, stall = job_plan.sources[-1].has_after_s, job_plan.costs.stall_s
    least = _up(max(durable_s, 1.0))

    def lost_at(interval_s: float) -> float:
        return job_plan.store_lost_at(interval_s, WORSE)

    longest, least_lost = _longest(lost_at, least, scenario.slack)
    capped = longest > LOST_MAX_S
    most = max(least * 2, _down(min(longest, LOST_MAX_S)))
    best = f"best: {duration_text(job_plan.store_only.seconds)}"
    worse = (
        f"costs {percent_text(lost_at(most) - least_lost)} more of the time if failures are {WORSE:g} times as frequent"
    )
    apart = f"no two within {duration_text(stall / scenario.overhead)}, as one takes {duration_text(stall)}"
    return [
        PresetLine("checkpoint.adaptive", "at_least", f"{least:g}s",
                       f"a save takes {duration_text(durable_s)} until it is durable in the store"),
        PresetLine(
            "checkpoint.adaptive", "at_most", f"{most:g}s",
            f"{best}; no failure takes more than {duration_text(LOST_MAX_S)} of work" if capped else f"{best}; this {worse}",
        ),
        PresetLine("checkpoint.adaptive", "overhead", scenario.overhead, f"the steps' share for saves: {apart}"),
    ]  # fmt: skip


def _keeping(scenario: PresetScenario, job_plan: JobPlan) -> list[PresetLine]:
    size = job_plan.question.size.bytes
    lines = [
        PresetLine(
            "checkpoint.keep",
            "last",
            scenario.kept,
            f"{size_text(size)} each, {size_text(job_plan.kept_bytes)} with the one being written",
        )
    ]
    if scenario.lasting:
        lines += [
            PresetLine("checkpoint.keep", "daily", 7, f"{size_text(7 * size)} at most, to go back within a week"),
            PresetLine("checkpoint.keep", "weekly", 4, f"{size_text(4 * size)} at most"),
            PresetLine("checkpoint.keep", "monthly", 12, f"{size_text(12 * size)} at most"),
            PresetLine("checkpoint.keep", "undo_window", "24h", "what went may be recalled for a day"),
        ]
    if not scenario.cheap and not scenario.sparing:
        why = f"one from before damage that goes unnoticed: up to {NOTICED_STEPS:,} steps were seen"
        lines.append(PresetLine("checkpoint.keep", "lag_steps", NOTICED_STEPS, why))
    if scenario.cheap:
        lines += [
            PresetLine("checkpoint.compact", "reuse", True, "what two saves have in common is stored once"),
            PresetLine("checkpoint.compact", "codecs", "auto", "coded where that takes no longer than storing it raw"),
        ]
    return lines


def _resources(scenario: PresetScenario, job_plan: JobPlan) -> list[PresetLine]:
    lines, layout, size = [], job_plan.question.layout, job_plan.question.size.bytes
    if "peers" in job_plan.question.levels:
        without = plan(replace(job_plan.question, levels=("memory", "store")))
        memory = f"{size_text(job_plan.host_bytes - without.host_bytes)} of each node's memory"
        why = f"goodput +{percent_text(job_plan.goodput - without.goodput, 2)}, for {memory}: a new node restores from another node's"
        lines.append(PresetLine("checkpoint.peers", "copies", 1, why))
    if scenario.sparing:
        rank = size / layout.gpus
        lines += [
            PresetLine(
                "checkpoint.limits",
                "memory",
                math.ceil(rank * 1.05 / 1e6) * 10**6,
                f"one snapshot at a time: {size_text(rank)} for a rank, and a twentieth more",
            ),
            PresetLine("checkpoint.limits", "threads", 1, "a core is left to training"),
            PresetLine("checkpoint.limits", "nice", 19, "whatever else runs goes first"),
        ]
    return lines


def _copies(scenario: PresetScenario, job_plan: JobPlan, copies: str) -> list[PresetLine]:
    """Another place for what lasts: a disaster takes a store with all that is in it."""
    if not scenario.guarded:
        return []
    size = job_plan.question.size.bytes
    months = f"{size_text(12 * size)} at most; what goes from the near store is there first"
    return [
        PresetLine("checkpoint.tiers.cold", "url", copies, "another site or bucket; the run's name is added"),
        PresetLine("checkpoint.tiers.cold", "lag", "1h", "the copies may be so far apart"),
        PresetLine("checkpoint.tiers.cold.keep", "last", scenario.kept, "as near"),
        PresetLine("checkpoint.tiers.cold.keep", "monthly", 12, months),
    ]


def _guarding(scenario: PresetScenario, copies: str, keys: str) -> list[PresetLine]:
    if not scenario.guarded:
        return []
    return [
        PresetLine("environment", "key", f"file:{keys}/store.key", "what is stored is encrypted"),
        PresetLine("environment", "sign", f"ed25519:file:{keys}/signing.key", "records are signed"),
        PresetLine(
            "environment", "audit", f"{copies}-audit", "who did what is recorded where the jobs' store does not reach"
        ),
        PresetLine("alerts", "to", ("env:ALERTS_URL",), "who is notified; relight metrics alerts test sends one"),
    ]


def _first(copies: str, keys: str) -> tuple[str, ...]:
    return (
        f"relight keys new {keys}/store.key   (and a second one: relight keys add STORE file:…)",
        f'relight keys new --signing {keys}/signing.key   (it prints what trust = "…" in [environment] has to be on readers)',
        "export RELIGHT_SETTINGS=THIS_FILE   (keys, tiers and the audit log count only in a file that is named)",
        f"replace {copies} and the receiver of alerts by yours",
    )


def _watching(scenario: PresetScenario, job_plan: JobPlan) -> list[PresetLine]:
    start, back = job_plan.known["start"].value, max(source.restart_s for source in job_plan.sources)
    others = job_plan.question.layout.nodes > 1
    idle = scenario.cheap or scenario.sparing
    waits = (
        "processes that wait take memory"
        if idle
        else f"spare processes shorten the {duration_text(start)} of a start after each failure"
    )
    leaves = "if others can take its place" if others else "where there are others: not here"
    first, loading = (float(max(900, _up(PATIENCE * seconds))) for seconds in (back, back - start))
    return [
        PresetLine(
            "supervise", "start_s", first, f"three times the {duration_text(back)} that a restart takes, or 15 min"
        ),
        PresetLine(
            "supervise", "phase_s", loading, f"three times the {duration_text(back - start)} of a load, or 15 min"
        ),
        PresetLine("supervise", "spares", not idle, waits),
        PresetLine("supervise", "drain", others, f"a machine about to fail leaves, having saved, {leaves}"),
    ]


def _longest(lost_at: Callable[[float], float], least_s: float, slack: float) -> tuple[float, float]:
    """Return the longest interval, from ``least_s`` on, that loses at most ``slack`` more of the time than the best one,
    and what the best one loses."""
    grid = [least_s * 1.02**power for power in range(1200)]
    lost = [lost_at(interval_s) for interval_s in grid]
    allowed = min(lost) + slack
    return max(interval_s for interval_s, share in zip(grid, lost) if share <= allowed), min(lost)


def _up(seconds: float) -> float:
    """Round up to a multiple of half the power of ten: 15, 20, 25 …, 150, 200 …"""
    return _rounded(seconds, math.ceil)


def _down(seconds: float) -> float:
    return _rounded(seconds, math.floor)


def _rounded(seconds: float, way: Callable[[float], int]) -> float:
    unit = 10.0 ** math.floor(math.log10(seconds)) / 2
    return way(round(seconds / unit, 9)) * unit


def _value(value: str | int | float | bool | tuple[str, ...]) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(_value(item) for item in value)}]"
    if isinstance(value, bool):
        return "true" if value else "false"
    return (
        f'"{value}"'
        if isinstance(value, str)
        else f"{value:_}"
        if isinstance(value, int) and value >= 10**6
        else str(value)
    )
