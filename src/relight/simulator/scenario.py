"""What is simulated: the machines, what befalls them and how often, what saving and coming back cost. Values only."""

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
    """One way to fail. Its rate is that of the devices (``per_million_gpu_hours``) and of the job (``per_day``), together."""

    name: Name
    kind: str = "hardware"
    """As ``relight run`` would take it: one of its kinds of failure."""
    per_million_gpu_hours: Amount = 0.0
    per_day: Amount = 0.0
    takes_nodes: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 1
    """How many machines lose their memory at once, side by side; 0: only processes end."""
    broken: Share = 1.0
    """The share after which these machines are away for repair."""
    detect_s: Seconds = 10.0
    """Until the job knows."""
    shape: Annotated[float, msgspec.Meta(ge=0.2, le=5)] = 1.0
    """Of the Weibull law between two of them, below 1 for failures that come in groups; 1: at random."""
    aftershock: Annotated[float, msgspec.Meta(ge=0, le=0.9)] = 0.0
    """How probably another one follows, within about ``aftershock_s``."""
    aftershock_s: Seconds = HOUR_S
    risk: str = ""
    """As what ``relight run`` would foresee it, such as ``ecc`` or ``hardware``; empty: nobody can."""
    notice_s: Seconds = 0.0
    """How long before it is announced."""


class SavingCosts(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What a save costs."""

    stall_s: Seconds = 1.0
    """Training waits so long."""
    durable_s: Seconds = 30.0
    """From the beginning of a save until it survives its writers."""
    peers_s: Seconds = 5.0
    """From its beginning until other nodes' memory has it."""
    bytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 60)] = 0
    restorable: Share = 1.0
    """The share of stored checkpoints that can be restored. A way back that meets another one reads it, and takes the one before."""


class Restarting(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """What it takes to train again, once it is known that it must, and there are machines."""

    base_s: Seconds = 50.0
    per_gpu_s: Seconds = 0.009
    spread: Annotated[float, msgspec.Meta(ge=0, le=2)] = 0.0
    """Sigma of the lognormal factor of all that; the median stays."""
    read_bytes_per_s: Amount = 0.0
    """What the store gives all readers together; 0: reading takes no time."""
    readers: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1
    """How many read all of it at once, each replica of the model for itself."""
    memory_s: Seconds = 5.0
    """Reading from memory, the node's own or that of its peers."""
    human_s: Seconds = 2 * HOUR_S
    """Until somebody looks, when the supervisor gives up."""
    requeue_s: Seconds = 600.0
    """Until the job is given machines again after it was sent away."""


class Repairing(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """How long a broken machine is away: lognormal."""

    median_s: Seconds = 54 * 60.0
    sigma: Annotated[float, msgspec.Meta(ge=0, le=4)] = 1.94


class Lemons(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Machines that fail again and again."""

    share: Share = 0.0
    mtbf_hours: Annotated[float, msgspec.Meta(ge=0.1, le=1e6)] = 152.0
    cured: Share = 0.5
    """The share of their repairs that help."""
    broken: Share = 0.0
    """The share of their failures after which they are seen to be broken. Otherwise it is up to the supervisor to have them leave."""
    detect_s: Seconds = 10.0


class Silent(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Wrong results that nothing reports."""

    per_million_gpu_hours: Amount = 0.0
    sticky: Share = 0.8
    """How probably the same machine does it again."""
    again_s: Seconds = 2 * DAY_S
    """About when."""
    lag_steps: tuple[Annotated[int, msgspec.Meta(ge=1, le=10**9)], Annotated[int, msgspec.Meta(ge=1, le=10**9)]] = (1, 5000)
    """Steps until it shows: log-uniform between the two."""
    found: Share = 0.7
    """How probably the machine is found then, and replaced."""
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
    """Machines that wait."""
    save: SavingCosts = SavingCosts()
    restart: Restarting = Restarting()
    repair: Repairing = Repairing()
    lemons: Lemons = Lemons()
    silent: Silent = Silent()
    failure: tuple[Failing, ...] = ()
    policy: dict[str, str] = {}
    """Policies that are compared if none is asked for: a name, and what ``--policy`` takes."""

    @property
    def nodes(self) -> int:
        """Machines that work."""
        return -(-self.gpus // self.gpus_per_node)

    @property
    def wall_s(self) -> float:
        """All of the time."""
        return self.days * DAY_S

    @property
    def restart_s(self) -> float:
        """Without reading, and without what chance adds."""
        return self.restart.base_s + self.restart.per_gpu_s * self.gpus

    @property
    def read_s(self) -> float:
        """Reading from the store, all at once."""
        rate = self.restart.read_bytes_per_s
        return self.save.bytes * self.restart.readers / rate if rate else 0.0

    def rate_per_s(self, one: Failing) -> float:
        """Of one way to fail, without its aftershocks."""
        return one.per_million_gpu_hours * self.gpus / 1e6 / HOUR_S + one.per_day / DAY_S

    @property
    def failures_per_s(self) -> float:
        """Of all that end the job, with aftershocks and lemons: those that are to be expected while it trains."""
        lemons = self.lemons.share * self.nodes / (self.lemons.mtbf_hours * HOUR_S)
        return lemons + sum(self.rate_per_s(one) / (1 - one.aftershock) for one in self.failure)


def check(scenario: Scenario) -> Scenario:
    """The same, if it makes sense. ``ConfigError`` says what does not, before anything takes long."""
    for path, value in _numbers(msgspec.to_builtins(scenario), ""):
        if not math.isfinite(value):
            raise ConfigError(f"{path} is {value}", where=scenario.name, hint="a number that is finite")
    if scenario.nodes > NODES_MAX:
        hint = "a larger gpus_per_node"
        raise ConfigError(f"{scenario.nodes:,} machines, and at most {NODES_MAX:,} are simulated", where=scenario.name, hint=hint)
    names = [one.name for one in scenario.failure]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"two failures are called {twice[0]!r}", where=scenario.name, hint="results are told by these names")
    if reserved := sorted({"lemon", "silent"} & set(names)):
        raise ConfigError(f"a failure cannot be called {reserved[0]!r}", where=scenario.name, hint="[lemons] and [silent] are told by it")
    for at, one in enumerate(scenario.failure):
        _check_failing(scenario, one, f"failure[{at}]")
    expected = (scenario.failures_per_s + _silent_per_s(scenario)) * scenario.wall_s
    if expected > FAILURES_MAX:
        told = f"about {expected:,.0f} failures are to be expected in {scenario.days:g} days, and at most {FAILURES_MAX:,} are simulated"
        raise ConfigError(told, where=scenario.name, hint="fewer days, or lower rates")
    if scenario.silent.lag_steps[0] > scenario.silent.lag_steps[1]:
        raise ConfigError("silent.lag_steps is the fewest and the most, in this order", where=scenario.name)
    return scenario


def _check_failing(scenario: Scenario, one: Failing, path: str) -> None:
    if one.kind not in KINDS:
        raise ConfigError(f"{path}.kind: there is no kind of failure {one.kind!r}", where=scenario.name, hint=f"one of {', '.join(KINDS)}")
    if one.kind == "fenced":
        raise ConfigError(f"{path}.kind: 'fenced' ends a run for good", where=scenario.name, hint="choose another kind")
    if one.risk and one.risk not in ACTIONS:
        raise ConfigError(f"{path}.risk: nothing is foreseen as {one.risk!r}", where=scenario.name, hint=f"one of {', '.join(ACTIONS)}")
    if one.takes_nodes > scenario.nodes:
        told = f"{path}.takes_nodes: {one.takes_nodes:,} machines at once, and there are {scenario.nodes:,}"
        raise ConfigError(told, where=scenario.name, hint="fewer, or more gpus")


def _silent_per_s(scenario: Scenario) -> float:
    again = scenario.silent.sticky and scenario.silent.again_s < HOUR_S
    return scenario.silent.per_million_gpu_hours * scenario.gpus / 1e6 / HOUR_S * (100.0 if again else 1.0)


def _numbers(value: Any, path: str) -> list[tuple[str, float]]:
    if isinstance(value, dict):
        return [found for key, inner in value.items() for found in _numbers(inner, f"{path}.{key}".lstrip("."))]
    if isinstance(value, (list, tuple)):
        return [found for at, inner in enumerate(value) for found in _numbers(inner, f"{path}[{at}]")]
    return [(path, float(value))] if isinstance(value, (int, float)) and not isinstance(value, bool) else []
