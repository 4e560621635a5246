"""``relight.adaptive()``: a trigger with an interval that is computed from measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from relight.errors import ConfigError, shown
from relight.policy.argument_checks import checked_arguments, name_of, number_above_0, share_of
from relight.policy.call_text import ShownAsCall
from relight.policy.triggers import Trigger, TriggerInput, parts_of
from relight.save_reason import Kind
from relight.settings.checkpoint_settings import AdaptiveSettings
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, Rate, duration_text, percent_text

EARLIEST_SHARE = 0.5
"""Least share of the interval after which a save may be brought forward because the loss has dropped."""


BUSY_FACTOR = 2.0
"""Factor of the interval while a resource is busy."""
RESOURCES = ("disk", "device")
_ROUTINE = "adaptive, "


@dataclass(frozen=True, slots=True, repr=False)
class Adaptive(ShownAsCall, Trigger):
    """See ``adaptive``. The caller computes the interval (``relight.cost_model``): one rank, for all ranks."""

    _call: ClassVar[str] = "adaptive"
    _arguments: ClassVar[dict[str, str]] = {
        "at_least_s": "at_least", "at_most_s": "at_most", "mtbf_s": "mtbf", "bytes_per_s_most": "bytes_per_second",
    }  # fmt: skip
    kind: ClassVar[Kind] = "adaptive"
    at_least_s: float = 0.0
    at_most_s: float | None = None
    """None: computed from the cost of a save (``relight.cost_model.IntervalBounds``)."""
    overhead: float = 0.5
    total_steps: int | None = None
    mtbf_s: float | None = None
    loss: str | None = None
    drop: float | None = None
    risk: Callable[[], float] | None = None
    bytes_per_s_most: float | None = None
    phases: Mapping[str, float] = field(default_factory=dict)
    busy: Mapping[str, float] = field(default_factory=dict)

    def scaled(self, interval_s: float, phase: str, use: Mapping[str, float]) -> tuple[float, str]:
        """Return the interval for a named phase and each resource's share of use, and the reason; an empty reason:
        unchanged."""
        factor, reasons = self.phases.get(phase, 1.0), []
        if factor != 1:
            reasons.append(f"phase {phase!r}: {factor:g} times the interval")
        over = [
            f"{name} {percent_text(use[name])} in use" for name, most in self.busy.items() if use.get(name, 0.0) > most
        ]
        if over:
            reasons.append(f"{BUSY_FACTOR:g} times as {' and '.join(over)}")
        scaled_s = interval_s * factor * (BUSY_FACTOR if over else 1.0)
        most_s = math.inf if self.at_most_s is None else max(interval_s, self.at_most_s)
        return min(max(scaled_s, self.at_least_s), most_s), "; ".join(reasons)

    def due(self, facts: TriggerInput) -> str | None:
        """See ``Trigger``. Without an interval this returns None: another rank has the interval, and requests the
        save."""
        if facts.interval_s is None:
            return None
        since_s = facts.now_s - facts.last_save_s
        if since_s >= facts.interval_s:
            return f"{_ROUTINE}every {duration_text(facts.interval_s)}"
        if self.loss is None or self.drop is None or since_s < EARLIEST_SHARE * facts.interval_s:
            return None
        value, known = facts.metrics.get(self.loss, math.nan), facts.best.get(f"{self.loss}:min", math.nan)
        return f"{_ROUTINE}{self.loss} fell to {value:.6g}" if known - value > self.drop * abs(known) else None

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        """See ``Trigger``."""
        return frozenset() if self.loss is None else frozenset({(self.loss, "min")})


def adaptive_part(trigger: Trigger | None) -> Adaptive | None:
    """Return the part of a trigger that needs a computed interval, if it has one."""
    return next((part for part in parts_of(trigger) if isinstance(part, Adaptive)), None)


@short_traceback
def adaptive(
    *,
    at_least: Duration | None = None,
    at_most: Duration | None = None,
    overhead: float = 0.5,
    total_steps: int | None = None,
    mtbf: Duration | None = None,
    loss: str | None = None,
    drop: float | None = None,
    risk: Callable[[], float] | None = None,
    bytes_per_second: Rate | None = None,
    phases: Mapping[str, float] | None = None,
    busy: Mapping[str, float] | None = None,
) -> Trigger:
    """Return a trigger that minimises lost time: its interval follows from the measured costs of saves and restarts, and
    the failure rate.

    Each change emits ``schedule.changed``. Decided intervals are stored in the run's log, where ``relight log --why``
    reads them.

    >>> adaptive(at_least="30s", at_most="15m").due(TriggerInput(9, now_s=50, last_save_step=None, last_save_s=0, interval_s=40))
    'adaptive, every 40 s'

    Args:
        at_least: The shortest interval: ``"30s"``, a ``timedelta``, or seconds. None: no limit.
        at_most: The longest interval: ``"1h"``, a ``timedelta``, or seconds. None: an hour, or 100 times the steps'
            time that a save takes if that is longer.
        overhead: The largest share of the steps' time that saves may take: between 0 and 1.
        total_steps: The number of steps of the whole training. None: unknown.
        mtbf: The mean time between failures of this job: ``"12h"``, a ``timedelta``, or seconds. None: by published
            rates.
        loss: The name of a metric. While it is volatile, saves are more frequent.
        drop: The share, between 0 and 1, by which ``loss`` must fall below its value at the best save for the next save
            to come earlier.
        risk: A function that returns the present failure rate relative to the usual one; called at each decision.
        bytes_per_second: The most that saves may write to the store: ``"200MB/s"``, or bytes a second. A limit that
            costs 1 % of the time or more is reported once, by the event ``schedule.bound``. None: no limit.
        phases: The factor of the interval for each value of ``ckpt.phase``: ``{"warm-up": 4, "reinforcement": 0.5}``.
        busy: Shares of use: ``{"disk": 0.8, "device": 0.95}``. The interval doubles while the store's disk or the
            accelerator was in use for more than this share of the last seconds without a save.
    """
    values = checked_arguments(AdaptiveSettings, locals(), required=("overhead",))
    least_s, most_s = values["at_least"] or 0.0, values["at_most"]
    if most_s is not None and least_s > most_s:
        raise ConfigError(f"at_least={at_least!r} is more than at_most={at_most!r}")
    if drop is not None and loss is None:
        raise ConfigError("drop needs loss=, which names the metric that may drop", hint='loss="loss", drop=0.1')
    loss = None if loss is None else name_of(loss, "loss")
    if risk is not None and not callable(risk):
        raise ConfigError(f"risk must be a function that gives a number, not {shown(risk)}")
    factors = _named(phases, "phases", '{"warm-up": 4}')
    shares = {name: share_of(value, f"busy[{name!r}]") for name, value in _named(busy, "busy", '{"disk": 0.8}').items()}
    if unknown := sorted(shares.keys() - set(RESOURCES)):
        raise ConfigError(f"busy= names {unknown[0]!r}", where="busy=", hint=f"it may have {' and '.join(RESOURCES)}")
    steps, mtbf_s, pace = values["total_steps"], values["mtbf"], values["bytes_per_second"]
    return Adaptive(
        least_s, most_s, values["overhead"], steps, mtbf_s, loss, values["drop"], risk, pace, factors, shares
    )


def _named(given: object, what: str, example: str) -> dict[str, float]:
    """Return a number above 0 for each name; an empty dict for None."""
    if given is None:
        return {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ConfigError(
            f"{what} maps names to numbers, and is not {shown(given)}", where=f"{what}=", hint=f"{what}={example}"
        )
    return {name: number_above_0(value, f"{what}[{name!r}]") for name, value in given.items()}
