"""Plans a job: what saving a model costs on a cluster, the interval for each level, the share of time lost; each number
with its source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relight.cost_model.interval import Costs, best_interval
from relight.cost_model.levels import Level, Levels, best_levels, total_waste
from relight.cost_model.rates import Belief
from relight.cost_model.schedule import RESTART_PER_DEVICE_S, RESTART_S
from relight.cost_model.sizing import Size
from relight.errors import ConfigError
from relight.units import duration_text

ASSUMED = {"copy": 25e9, "link": 25e9, "store_write": 200e9, "store_read": 200e9}
"""Assumed bytes per second if they are neither measured nor given: from a GPU to its host's memory and between nodes
(each half of what PCIe 5 x16 and a 400 Gbit/s link carry), and of a store for all nodes together (a large object
store)."""
SHARES = {"memory": (54 + 7 + 2) / 419, "store": 35 / 419}
"""Shares of Llama 3's 419 interruptions.

``memory``: software bugs, watchdogs and dependencies, after which the hosts' memory is intact. ``store``: switches and
cables, which may take several nodes at once. All others lose one node, and its peers have its state.
"""


def share_restored_from(number: int, count: int) -> float:
    """Return the share of the failures that are restored from the ``number``-th of ``count`` tiers after the nearest
    one.

    The nearest tier may be on a lost node. The last tier serves failures of several nodes, those before it failures of
    one node.
    """
    if count == 1:
        return 1 - SHARES["memory"]
    return SHARES["store"] if number == count - 1 else (1 - SHARES["memory"] - SHARES["store"]) / (count - 1)


SLOTS = 2
"""Snapshots that a node's memory holds: one stays complete while the next one is copied."""
MONTH_S = 365.25 / 12 * 86400.0


@dataclass(frozen=True, slots=True)
class KnownNumber:
    """A number and its source."""

    value: float
    source: str


@dataclass(frozen=True, slots=True)
class MeasuredTime:
    """Seconds for a number of bytes: a fixed part, and a part proportional to the bytes.

    From ``relight bench``, on this machine.
    """

    fixed_s: float
    per_byte_s: float
    source: str

    def seconds(self, count: float) -> float:
        """Return the seconds for ``count`` bytes."""
        return self.fixed_s + self.per_byte_s * count


@dataclass(frozen=True, slots=True)
class ParallelLayout:
    """Parallel layout of a model."""

    gpus: int = 1
    per_node: int = 8
    tensor: int = 1
    pipeline: int = 1
    zero: int = 3
    """What data parallelism shards: 0 nothing, 1 and 2 the optimizer, 3 the weights as well (FSDP)."""

    def __post_init__(self) -> None:
        for name in ("gpus", "per_node", "tensor", "pipeline"):
            if not 1 <= getattr(self, name) <= 10**7:
                raise ConfigError(f"{name} must be a number from 1 to 10,000,000, not {getattr(self, name)}")
        if self.gpus % (self.tensor * self.pipeline):
            raise ConfigError(
                f"{self.gpus} GPUs cannot be divided into groups of {self.tensor} × {self.pipeline}",
                hint="--gpus, --tp, --pp",
            )
        if self.zero not in (0, 1, 2, 3):
            raise ConfigError(f"zero must be a stage from 0 to 3, not {self.zero}")

    @property
    def nodes(self) -> int:
        """Return the number of machines; the last one may be partly used."""
        return math.ceil(self.gpus / self.per_node)

    def resident(self, size: Size) -> float:
        """Return the bytes of the saved state that one GPU holds, and reads when it restores."""
        groups, data = self.tensor * self.pipeline, self.gpus // (self.tensor * self.pipeline)
        weights = size.parts.get("weights", 0)
        return weights / groups / (data if self.zero == 3 else 1) + (size.bytes - weights) / groups / (
            data if self.zero else 1
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """Input of a plan. ``paces``: bytes per second, by the names of ``ASSUMED``; missing ones are assumed."""

    size: Size
    layout: ParallelLayout
    belief: Belief
    rate_source: str
    paces: Mapping[str, float] = field(default_factory=dict)
    measured: Mapping[str, MeasuredTime] = field(default_factory=dict)
    """Measured times of one machine: ``stall``, ``durable``, ``load``."""
    start_s: float | None = None
    levels: Sequence[str] = ("memory", "peers", "store")
    window_s: float = 60.0
    kept: int = 3
    gpu_hour: float | None = None
    store_tb_month: float | None = None
    stored: KnownNumber | None = None
    """Stored bytes divided by bytes of state, from a run's checkpoints; None: 1."""
    at_least_s: float = 0.0
    at_most_s: float | None = None
    """The user's bounds of the interval."""

    def __post_init__(self) -> None:
        if self.at_most_s is not None and not 0 <= self.at_least_s <= self.at_most_s:
            raise ConfigError(
                f"the bounds of the interval are {duration_text(self.at_least_s)} and {duration_text(self.at_most_s)}",
                hint="the first must not exceed the second",
            )


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plan."""

    question: Question
    known: Mapping[str, KnownNumber]
    """Each number that the plan uses, with its source."""
    levels: tuple[Level, ...]
    best: Levels
    store_only: tuple[float, float]
    """With only the store: the interval, and the share of time lost."""
    free: Levels
    """The best levels without the user's bounds."""

    @property
    def goodput(self) -> float:
        """Return the share of time in steps that are not repeated."""
        return 1.0 - self.best.waste

    def lost_at(self, interval_s: float) -> float:
        """Return the share of time lost if the nearest level saved at that interval, and the others at their multiples
        of it."""
        return total_waste(
            self.question.belief.rate_per_s, self.levels, [interval_s * level.multiple for level in self.best.levels]
        )

    def store_lost_at(self, interval_s: float, worse: float = 1.0) -> float:
        """Return the share of time lost with only the store, with saves at that interval, and ``worse`` times as many
        failures."""
        only = self.levels[-1]
        alone = Level(only.name, Costs(self.levels[0].costs.stall_s, only.costs.durable_s, only.costs.restart_s), 1.0)
        return total_waste(self.question.belief.rate_per_s * worse, [alone], [interval_s])

    @property
    def kept_bytes(self) -> int:
        """Return the bytes in the store: the kept checkpoints, and one more that is being written."""
        share = self.question.stored.value if self.question.stored is not None else 1.0
        return round(self.question.size.bytes * (self.question.kept + 1) * share)

    @property
    def bound_cost(self) -> float:
        """Return the share of the time that the user's bounds cost."""
        return max(0.0, self.best.waste - self.free.waste)

    @property
    def host_bytes(self) -> int:
        """Return the bytes of memory of each node for snapshots; twice as many with peers."""
        own = SLOTS * self.question.size.bytes / self.question.layout.nodes
        return round(own * (2 if any(level.name == "peers" for level in self.levels) else 1))

    @property
    def load_bytes(self) -> float:
        """Return the bytes that all GPUs together read in a restore."""
        return self.question.layout.resident(self.question.size) * self.question.layout.gpus

    @property
    def month(self) -> dict[str, float]:
        """Return the costs of a month, of the items with a price: storage, and lost GPU time."""
        costs = {}
        if self.question.store_tb_month is not None:
            costs["storage"] = self.kept_bytes / 1e12 * self.question.store_tb_month
        if self.question.gpu_hour is not None:
            costs["lost GPU time"] = (
                self.best.waste * self.question.layout.gpus * MONTH_S / 3600 * self.question.gpu_hour
            )
        return costs


def plan(question: Question) -> JobPlan:
    """Compute the plan for a question."""
    known = {
        name: KnownNumber(question.paces.get(name, pace), "given" if name in question.paces else "assumed")
        for name, pace in ASSUMED.items()
    }
    layout = question.layout
    if question.start_s is not None:
        known["start"] = KnownNumber(question.start_s, "given")
    else:
        known["start"] = KnownNumber(
            RESTART_S + RESTART_PER_DEVICE_S * layout.gpus, "FT-HSDP's cold restarts: 50 s and 9 ms a GPU"
        )
    known["mtbf"] = KnownNumber(question.belief.mtbf_s, question.rate_source)
    times = _times(question, {name: number.value for name, number in known.items()}, known)
    levels = _levels(question, times, known["start"].value)
    rate = question.belief.rate_per_s
    free = best_levels(rate, levels)
    most_s = math.inf if question.at_most_s is None else question.at_most_s
    bounded = bool(question.at_least_s) or question.at_most_s is not None
    best = best_levels(rate, levels, at_least_s=question.at_least_s, at_most_s=most_s) if bounded else free
    far = levels[-1].costs
    least_s = max(far.durable_s, question.at_least_s)
    costs = Costs(times["stall"], far.durable_s, far.restart_s)
    alone = best_interval(rate, costs, at_least_s=least_s, at_most_s=max(least_s, most_s))
    if question.stored is not None:
        known["stored"] = question.stored
    return JobPlan(question, known, levels, best, (alone.seconds, alone.waste), free)


def _times(question: Question, pace: Mapping[str, float], known: dict[str, KnownNumber]) -> dict[str, float]:
    """Return the seconds of each part of a save and of a restore. Measured times replace computed ones."""
    size, layout = question.size.bytes, question.layout
    gpu, node, resident = size / layout.gpus, size / layout.nodes, layout.resident(question.size)
    node_resident = resident * min(layout.per_node, layout.gpus)
    times = {
        "stall": gpu / pace["copy"], "load from memory": resident / pace["copy"],
        "to peers": node / pace["link"], "from peers": node_resident / pace["link"],
        "to the store": max(size / pace["store_write"], node / pace["link"]),
        "from the store": max(resident * layout.gpus / pace["store_read"], node_resident / pace["link"]),
    }  # fmt: skip
    for name, replaced in (("stall", "stall"), ("durable", "to the store"), ("load", "from the store")):
        if name in question.measured:
            measured = question.measured[name]
            times[replaced] = measured.seconds(node_resident if name == "load" else node)
            known[f"{name}_s"] = KnownNumber(times[replaced], measured.source)
    return times


def _levels(question: Question, times: Mapping[str, float], start_s: float) -> tuple[Level, ...]:
    """Return the levels, near to far.

    Only the snapshot stalls the steps; it is then copied to the other levels without a further stall.
    """
    wanted = [
        name
        for name in ("memory", "peers", "store")
        if name in question.levels and (name != "peers" or question.layout.nodes > 1)
    ]
    if "store" not in wanted or set(question.levels) - {"memory", "peers", "store"}:
        raise ConfigError(
            f"levels must be some of memory and peers, and always store, not {', '.join(question.levels)[:60]}",
            hint="--levels memory,store",
        )
    stall = times["stall"]
    measured = "durable" in question.measured
    costs = {
        "memory": Costs(stall, stall, start_s + times["load from memory"]),
        "peers": Costs(stall, stall + times["to peers"], start_s + times["from peers"]),
        "store": Costs(
            stall,
            max(stall, times["to the store"]) if measured else stall + times["to the store"],
            start_s + times["from the store"],
        ),
    }
    shares = {"memory": SHARES["memory"], "store": SHARES["store"], "peers": 1 - SHARES["memory"] - SHARES["store"]}
    levels, carried = [], 0.0
    for position, name in enumerate(wanted):
        share = 1.0 - carried if name == "store" else shares[name]
        carried += share
        cost = costs[name]
        levels.append(Level(name, cost if position == 0 else Costs(0.0, cost.durable_s, cost.restart_s), share))
    return tuple(levels)


def fit(points: Sequence[tuple[float, float]], source: str) -> MeasuredTime:
    """Fit a line to (bytes, seconds) by least squares of relative errors, with no negative part.

    For one size: a line through the origin.
    """
    good = [(count, seconds) for count, seconds in points if count > 0 and 0 < seconds < math.inf]
    if not good:
        raise ConfigError("no usable measurement", where=source)
    weights = [seconds**-2 for _, seconds in good]
    total = sum(weights)
    mean_x = sum(weight * count for weight, (count, _) in zip(weights, good)) / total
    mean_y = sum(weight * seconds for weight, (_, seconds) in zip(weights, good)) / total
    spread = sum(weight * (count - mean_x) ** 2 for weight, (count, _) in zip(weights, good))
    slope = (
        sum(weight * (count - mean_x) * (seconds - mean_y) for weight, (count, seconds) in zip(weights, good)) / spread
        if spread
        else -1.0
    )
    if len({count for count, _ in good}) == 1 or mean_y - slope * mean_x < 0:
        square = sum(weight * count**2 for weight, (count, _) in zip(weights, good))
        return MeasuredTime(
            0.0, sum(weight * count * seconds for weight, (count, seconds) in zip(weights, good)) / square, source
        )
    return MeasuredTime(mean_y - slope * mean_x, slope, source) if slope >= 0 else MeasuredTime(mean_y, 0.0, source)
