"""Plans a job: what saving a model costs on a cluster, the save interval, the share of time lost; each number with its
source."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relight.cost_model.interval import Costs, Interval, best_interval, waste
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
INTERVAL_MIN_S = 1e-3
"""Shortest interval of a plan in seconds, also if saves cost nothing: shares and rates are divided by it."""
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
class RestoreSource:
    """A place from which a job restores after some of the failures. It gets every save."""

    name: str
    has_after_s: float
    """Seconds from the beginning of a save until this place has it."""
    restart_s: float
    """Seconds from a failure to the first step after it."""
    share: float
    """Share of the failures that are restored from this place, because no nearer one survives them."""


@dataclass(frozen=True, slots=True)
class JobPlan:
    """The plan."""

    question: Question
    known: Mapping[str, KnownNumber]
    """Each number that the plan uses, with its source."""
    sources: tuple[RestoreSource, ...]
    """Near to far. The last one is the store."""
    costs: Costs
    """Means over all failures."""
    store_costs: Costs
    """Costs if every restore reads from the store."""
    best: Interval
    store_only: Interval
    """The best interval if every restore reads from the store."""
    free: Interval
    """The best interval without the user's bounds."""

    @property
    def goodput(self) -> float:
        """Return the share of time in steps that are not repeated."""
        return 1.0 - self.best.waste

    def lost_at(self, interval_s: float) -> float:
        """Return the share of time lost with saves at that interval."""
        return waste(interval_s, self.question.belief.rate_per_s, self.costs)

    def store_lost_at(self, interval_s: float, worse: float = 1.0) -> float:
        """Return the share of time lost with only the store, with saves at that interval, and ``worse`` times as many
        failures."""
        return waste(interval_s, self.question.belief.rate_per_s * worse, self.store_costs)

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
        return round(own * (2 if any(source.name == "peers" for source in self.sources) else 1))

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
    sources = _sources(question, times, known["start"].value)
    store, rate = sources[-1], question.belief.rate_per_s
    costs, store_costs = _mean_costs(times["stall"], sources), Costs(times["stall"], store.has_after_s, store.restart_s)
    free_least_s = max(store.has_after_s, INTERVAL_MIN_S)
    least_s = max(free_least_s, question.at_least_s)
    most_s = math.inf if question.at_most_s is None else max(least_s, question.at_most_s)
    best, alone = (best_interval(rate, each, at_least_s=least_s, at_most_s=most_s) for each in (costs, store_costs))
    free = best_interval(rate, costs, at_least_s=free_least_s)
    if question.stored is not None:
        known["stored"] = question.stored
    return JobPlan(question, known, sources, costs, store_costs, best, alone, free)


def _times(question: Question, pace: Mapping[str, float], known: dict[str, KnownNumber]) -> dict[str, float]:
    """Return the seconds of each part of a save and of a restore. Measured times replace computed ones."""
    size, layout = question.size.bytes, question.layout
    gpu, node, resident = size / layout.gpus, size / layout.nodes, layout.resident(question.size)
    node_resident = resident * min(layout.per_node, layout.gpus)
    times = {
        "stall": gpu / pace["copy"], "from memory": resident / pace["copy"],
        "to peers": node / pace["link"], "from peers": node_resident / pace["link"],
        "to store": max(size / pace["store_write"], node / pace["link"]),
        "from store": max(resident * layout.gpus / pace["store_read"], node_resident / pace["link"]),
    }  # fmt: skip
    for name, replaced in (("stall", "stall"), ("durable", "to store"), ("load", "from store")):
        if name in question.measured:
            measured = question.measured[name]
            times[replaced] = measured.seconds(node_resident if name == "load" else node)
            known[f"{name}_s"] = KnownNumber(times[replaced], measured.source)
    return times


def _sources(question: Question, times: Mapping[str, float], start_s: float) -> tuple[RestoreSource, ...]:
    """Return the places that restores read from, near to far. Peers get a save once it is durable in the store."""
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
    stall, to_store = times["stall"], times["to store"]
    durable_s = max(stall, to_store) if "durable" in question.measured else stall + to_store
    has_after_s = {"memory": stall, "peers": durable_s + times["to peers"], "store": durable_s}
    shares = {"memory": SHARES["memory"], "peers": 1 - SHARES["memory"] - SHARES["store"]}
    shares["store"] = 1 - sum(shares[name] for name in wanted if name != "store")
    return tuple(
        RestoreSource(name, has_after_s[name], start_s + times[f"from {name}"], shares[name]) for name in wanted
    )


def _mean_costs(stall_s: float, sources: Sequence[RestoreSource]) -> Costs:
    """Return the costs as means over all failures.

    A snapshot in memory counts at once, because the agent commits it after a failure of the trainer. After any other
    failure, only a save counts that was durable in the store: no peer has another one.
    """
    late_s = sum(source.share for source in sources if source.name != "memory") * (sources[-1].has_after_s - stall_s)
    return Costs(stall_s, stall_s + late_s, sum(source.share * source.restart_s for source in sources))


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
