"""Parameters of a simulation: machines, failures and their rates, costs of saves and restarts. Values only."""

from __future__ import annotations

import math
from typing import Annotated, Any

import msgspec

from relight.errors import ConfigError
from relight.prediction.act import ACTIONS
from relight.supervise.facts import KINDS

Share = Annotated[float, msgspec.Meta(ge=0, le=1)]
Amount = Annotated[float, msgspec.Meta(ge=0, le=1e18)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=3.2e8)]
Count = Annotated[int, msgspec.Meta(ge=0, le=1_000_000)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=40)]

HOUR_S, DAY_S = 3600.0, 86400.0
FAILURES_MAX = 2_000_000
SAVES_MAX = 5_000_000
NODES_MAX = 200_000


class Failing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One cause of failures.

    Its rate is the sum of a rate per device (``per_million_gpu_hours``) and a rate per job (``per_day``).
    """

    name: Name
    kind: str = "hardware"
    """Kind of failure that ``relight run`` would classify it as."""
    per_million_gpu_hours: Amount = 0.0
    per_day: Amount = 0.0
    takes_nodes: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    """Number of adjacent machines that lose their memory at once; 0: only processes end."""
    broken: Share = 1.0
    """Share of these failures that send the machines to repair."""
    detect_s: Seconds = 10.0
    """Seconds until the failure is detected."""
    shape: Annotated[float, msgspec.Meta(ge=0.2, le=5)] = 1.0
    """Shape of the Weibull distribution of the time between two failures.

    Below 1: failures cluster; 1: they are memoryless.
    """
    aftershock: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    """Probability that another such failure follows, after ``aftershock_s`` on average."""
    aftershock_s: Seconds = HOUR_S
    risk: str = ""
    """Risk that ``relight run`` would predict, such as ``ecc`` or ``hardware``; empty: the failure is unpredictable."""
    notice_s: Seconds = 0.0
    """Seconds of notice before the failure."""


class SavingCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Costs of a save."""

    stall_s: Seconds = 1.0
    """Seconds that training waits."""
    durable_s: Seconds = 30.0
    """Seconds from the beginning of a save until its commit: it survives the loss of its writers."""
    peers_s: Seconds = 5.0
    """Seconds from the commit of a save until other nodes have it in memory."""
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    restorable: Share = 1.0
    """Share of stored checkpoints that can be restored.

    A restore that fails has read its checkpoint, and falls back to the previous one.
    """


class Restarting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Costs of a restart, once the failure is detected and machines are available."""

    base_s: Seconds = 50.0
    per_gpu_s: Seconds = 0.009
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Sigma of a lognormal factor on the restart time. Its median is 1."""
    read_bytes_per_s: Amount = 0.0
    """Bytes a second of the store for all readers together; 0: reading takes no time."""
    readers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    """Number of replicas of the model that read the whole checkpoint at the same time."""
    memory_s: Seconds = 5.0
    """Seconds to read from the memory of the node or of its peers."""
    human_s: Seconds = 2 * HOUR_S
    """Seconds until an operator intervenes after the supervisor gives up."""
    requeue_s: Seconds = 600.0
    """Seconds in the scheduler's queue after the job ended to be requeued."""


class Repairing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Duration of a repair: lognormal."""

    median_s: Seconds = 54 * 60.0
    sigma: Annotated[float, msgspec.Meta(ge=0, le=4)] = 1.94


class Lemons(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Machines that fail repeatedly."""

    share: Share = 0.0
    mtbf_hours: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)] = 152.0
    cured: Share = 0.5
    """Share of their repairs that cure the machine."""
    broken: Share = 0.0
    """Share of their failures that reveal a broken machine.

    After the others, the supervisor must decide to exclude it.
    """
    detect_s: Seconds = 10.0


class Silent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Wrong results that nothing reports."""

    per_million_gpu_hours: Amount = 0.0
    sticky: Share = 0.8
    """Probability that the same machine repeats it."""
    again_s: Seconds = 2 * DAY_S
    """Mean seconds until it repeats it."""
    lag_steps: tuple[Annotated[int, msgspec.Meta(ge=1, le=10**9)], Annotated[int, msgspec.Meta(ge=1, le=10**9)]] = (
        1,
        5000,
    )
    """Steps until it shows: log-uniform between the two."""
    found: Share = 0.7
    """Probability that the machine is then identified and replaced."""
    inspect_s: Seconds = 600.0


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One job on a fleet."""

    name: Name = "fleet"
    about: Annotated[str, msgspec.Meta(max_length=500)] = ""
    gpus: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1024
    gpus_per_node: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 8
    nodes_per_rack: Annotated[int, msgspec.Meta(ge=1, le=10_000)] = 4
    days: Annotated[float, msgspec.Meta(gt=0, le=3650)] = 30.0
    step_s: Annotated[float, msgspec.Meta(ge=0.001, le=86400)] = 5.0
    spares: Count = 8
    """Spare machines."""
    save: SavingCosts = SavingCosts()
    restart: Restarting = Restarting()
    repair: Repairing = Repairing()
    lemons: Lemons = Lemons()
    silent: Silent = Silent()
    failure: tuple[Failing, ...] = ()
    policy: dict[str, str] = {}
    """Policies to compare if the user names none: name → value of ``--policy``."""

    @property
    def nodes(self) -> int:
        """Number of machines that train."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def wall_s(self) -> float:
        """Seconds of the simulated time."""
        return self.days * DAY_S

    @property
    def restart_s(self) -> float:
        """Seconds of a restart, without reading and without its random factor."""
        return self.restart.base_s + self.restart.per_gpu_s * self.gpus

    @property
    def read_s(self) -> float:
        """Seconds to read the checkpoint from the store, by all readers at the same time."""
        rate = self.restart.read_bytes_per_s
        return self.save.bytes * self.restart.readers / rate if rate else 0.0

    def rate_per_s(self, failing: Failing) -> float:
        """Return the failures a second of one cause, without aftershocks."""
        return failing.per_million_gpu_hours * self.gpus / 1e6 / HOUR_S + failing.per_day / DAY_S

    @property
    def failures_per_s(self) -> float:
        """Expected failures a second while the job trains, with aftershocks and lemons, without silent ones."""
        lemons = self.lemons.share * self.nodes / (self.lemons.mtbf_hours * HOUR_S)
        return lemons + sum(self.rate_per_s(failing) / (1 - failing.aftershock) for failing in self.failure)


def check(scenario: Scenario) -> Scenario:
    """Return ``scenario``.

    Raise ``ConfigError`` if its values contradict each other or would take too long to simulate.
    """
    for path, value in _numbers(msgspec.to_builtins(scenario), ""):
        if not math.isfinite(value):
            raise ConfigError(f"{path} is {value}", where=scenario.name, hint="a number that is finite")
    if scenario.nodes > NODES_MAX:
        hint = "a larger gpus_per_node"
        raise ConfigError(
            f"{scenario.nodes:,} machines, and at most {NODES_MAX:,} are simulated", where=scenario.name, hint=hint
        )
    names = [failing.name for failing in scenario.failure]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(
            f"two failures are called {twice[0]!r}",
            where=scenario.name,
            hint="results are listed by these names: choose another",
        )
    if reserved := sorted({"lemon", "silent"} & set(names)):
        raise ConfigError(
            f"a failure cannot be called {reserved[0]!r}",
            where=scenario.name,
            hint="results of [lemons] and [silent] have this name: choose another",
        )
    for index, failing in enumerate(scenario.failure):
        _check_failing(scenario, failing, f"failure[{index}]")
    expected = (scenario.failures_per_s + _silent_per_s(scenario)) * scenario.wall_s
    if expected > FAILURES_MAX:
        message = f"about {expected:,.0f} failures are expected in {scenario.days:g} days, and at most {FAILURES_MAX:,} are simulated"
        raise ConfigError(message, where=scenario.name, hint="fewer days, or lower rates")
    if scenario.silent.lag_steps[0] > scenario.silent.lag_steps[1]:
        raise ConfigError("silent.lag_steps is the fewest and the most, in this order", where=scenario.name)
    return scenario


def _check_failing(scenario: Scenario, failing: Failing, path: str) -> None:
    if failing.kind not in KINDS:
        raise ConfigError(
            f"{path}.kind: there is no kind of failure {failing.kind!r}",
            where=scenario.name,
            hint=f"one of {', '.join(KINDS)}",
        )
    if failing.kind == "fenced":
        raise ConfigError(f"{path}.kind: 'fenced' ends a run for good", where=scenario.name, hint="choose another kind")
    if failing.risk and failing.risk not in ACTIONS:
        raise ConfigError(
            f"{path}.risk: nothing is foreseen as {failing.risk!r}",
            where=scenario.name,
            hint=f"one of {', '.join(ACTIONS)}",
        )
    if failing.takes_nodes > scenario.nodes:
        message = f"{path}.takes_nodes: {failing.takes_nodes:,} machines at once, and there are {scenario.nodes:,}"
        raise ConfigError(message, where=scenario.name, hint="fewer, or more gpus")


def _silent_per_s(scenario: Scenario) -> float:
    repeats = scenario.silent.sticky and scenario.silent.again_s < HOUR_S
    return scenario.silent.per_million_gpu_hours * scenario.gpus / 1e6 / HOUR_S * (100.0 if repeats else 1.0)


def _numbers(value: Any, path: str) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [pair for key, inner in value.items() for pair in _numbers(inner, f"{path}.{key}".lstrip("."))]
    if isinstance(value, (list, tuple)):
        return [pair for index, inner in enumerate(value) for pair in _numbers(inner, f"{path}[{index}]")]
    return [(path, float(value))] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
