"""Reduces this node's load while it is too hot or under pressure.

Restores the load when the reading falls, or if the reduction does not help.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from relight.observe import emit
from relight.prediction import Alarm
from relight.prediction.sample import NodeSample
from relight.units import duration_text, percent_text

HEAT, PRESSURE = "heat", "pressure"
KINDS = (HEAT, PRESSURE)
"""Kinds of risk that less load can avert."""
TRY_S = 600.0
"""Seconds after which the load is restored even if the reading did not fall, because less load does not help then."""
QUIET_S = 3600.0
"""Seconds without another try after a load reduction that did not help."""
HOLDS_S = 60.0
"""Seconds that the reading must be low before the load is restored."""
RENEW_S = 30.0
"""Seconds after the supervisor's last request at which ranks stop pausing.

So a dead supervisor does not slow them for ever.
"""
_COOLER_C = 5.0
_LESS = 0.5
_POWER = 0.8
"""Power limit under heat, as a share of the limit before."""

Limits = Sequence[tuple[float, float]]
"""Watts of power limits: the higher and the lower one of each device."""


class Power(Protocol):
    """Accelerators with adjustable power limits."""

    def lower_power(self, share: float) -> Limits:
        """Lower each device's limit to that share. Return the watts before and after of each device that allows it."""
        ...

    def restore_power(self) -> Limits:
        """Give each device the limit that it had. Return the watts that each refusing device should have, and has."""
        ...


class _Reduced(NamedTuple):
    kind: str
    at: float
    rules: bool
    """Whether a rule raised the alarm: see ``reading_of``."""
    before: float
    paused_s: float
    """Seconds that ranks had paused before."""
    power: bool
    """Whether a power limit was lowered."""


class Load:
    """The load of one node. Used from one thread.

    ``pause``: share of the time that ranks pause. ``ease`` publishes that share to the ranks until a time, or withdraws
    it with 0. ``power``: None if power limits must stay unchanged.
    """

    def __init__(
        self,
        pause: float,
        ease: Callable[[float, float], bool],
        power: Power | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pause, self._ease, self._power, self._clock = pause, ease, power, clock
        self._now: _Reduced | None = None
        self._low_since: float | None = None
        self._useless: dict[str, float] = {}
        """By kind, the time of the last load reduction that did not help."""
        self._paused_s, self._asked_until = 0.0, -math.inf
        self._refused_at: float | None = None
        """Time of the last try to restore a power limit, if a device refused it."""

    @property
    def is_reduced(self) -> bool:
        """Whether ranks are asked to pause, or a power limit is lowered."""
        return self._now is not None

    @property
    def has_effect(self) -> bool:
        """Whether the node works less: a power limit is lowered, or a rank has paused. An alarm counts as acted on only then."""
        return self._now is not None and (self._now.power or self._paused_s > self._now.paused_s)

    def reduce(self, alarm: Alarm, sample: NodeSample) -> bool:
        """Reduce the load. Return whether it is reduced for this kind of alarm.

        Ranks pause at the end of their step only: see ``has_effect``.
        """
        now = self._clock()
        if self._now is not None:
            return alarm.kind == self._now.kind  # an alarm of another kind may need another action
        if alarm.kind not in KINDS or now - self._useless.get(alarm.kind, -math.inf) < QUIET_S:
            return False
        done = []
        if self._pause and self._ask():
            done.append(f"ranks pause {percent_text(self._pause)} of the time")
        limits = self._power.lower_power(_POWER) if alarm.kind == HEAT and self._power is not None else ()
        if limits:
            done.append(f"power limit of {_devices(limits)} {limits[0][0]:.0f} → {limits[0][1]:.0f} W")
        if not done:
            return False
        rules = alarm.detector == "rules"
        before = reading_of(alarm.kind, sample, rules=rules)
        self._now, self._low_since = _Reduced(alarm.kind, now, rules, before, self._paused_s, bool(limits)), None
        text = f"load reduced: {'; '.join(done)}; {_words(alarm.kind, before)}"
        emit("run.load", text, kind=alarm.kind, action="reduced", reading_before=_known(before), reading_after=None)
        return True

    def update(self, sample: NodeSample, paused_s: float = 0.0) -> None:
        """Process each second's reading. Restore the load once it has stayed low, or has not fallen in time.

        ``paused_s``: seconds that this node's ranks have paused so far.
        """
        self._paused_s = paused_s
        if self._now is None:
            if self._refused_at is not None and self._clock() - self._refused_at >= RENEW_S:
                self._restore_power()
            return
        now, value = self._clock(), reading_of(self._now.kind, sample, rules=self._now.rules)
        if math.isnan(self._now.before):  # the first known reading is the one to fall
            self._now = self._now._replace(before=value)
        if not is_low(self._now.kind, self._now.before, value):
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        if self._low_since is not None and now - self._low_since >= HOLDS_S:
            self._restore(value, "")
        elif self._low_since is None and now - self._now.at >= TRY_S:
            self._restore(value, self._judge(now))
        elif self._pause and not self._ask() and now >= self._asked_until and not self._now.power:
            self._restore(value, ", because ranks can no longer be asked to pause")

    def close(self) -> None:
        """Restore the load, whatever the reading is."""
        if self._now is not None:
            self._restore(math.nan, ", because the job ends")
        elif self._refused_at is not None:
            self._restore_power()

    def _judge(self, now: float) -> str:
        """Return why the load is restored without a lower reading. Only a reduction that was measured may count as useless."""
        assert self._now is not None
        if not self.has_effect:
            return ", because no rank paused: none completed a step"
        if math.isnan(self._now.before):
            return ", because no reading shows whether it helps"
        self._useless[self._now.kind] = now
        return ", because it did not help"

    def _ask(self) -> bool:
        until = self._clock() + RENEW_S
        if not self._ease(self._pause, until):
            return False
        self._asked_until = until
        return True

    def _restore(self, value: float, why: str) -> None:
        assert self._now is not None
        reduction, self._now = self._now, None
        self._ease(0.0, 0.0)
        kept = self._restore_power() if reduction.power else ""
        readings = f"{_words(reduction.kind, reduction.before)}, now {_number(reduction.kind, value)}"
        text = f"load restored after {duration_text(self._clock() - reduction.at)}{why}: {readings}{kept}"
        emit(
            "run.load",
            text,
            kind=reduction.kind,
            action="restored",
            reading_before=_known(reduction.before),
            reading_after=_known(value),
        )

    def _restore_power(self) -> str:
        """Restore power limits. Return which are still lowered, as text: these are tried again, at the job's end at the latest."""
        limits = self._power.restore_power() if self._power is not None else ()
        self._refused_at = self._clock() if limits else None
        if not limits:
            return ""
        watts = f"{limits[0][1]:.0f} W in place of {limits[0][0]:.0f} W"
        return f"; the power limit of {_devices(limits)} stays at {watts}: the driver refuses it"


def reading_of(kind: str, sample: NodeSample, *, rules: bool = False) -> float:
    """Return the reading that less load can lower.

    It is the hottest accelerator's temperature in °C, or the share of time in per cent that processes waited: for
    processors, or for disks if a rule raised the alarm. Training itself may keep processors busy all the time, so the
    higher one of both would never fall.
    """
    host = sample.host
    if kind == HEAT:
        values = [accelerator.temperature_c for accelerator in sample.accelerators]
    else:
        values = [host.psi_io_full if rules else host.psi_cpu_some]
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def is_low(kind: str, before: float, value: float) -> bool:
    """Return whether a reading has fallen far enough below the one before. An unknown reading has not."""
    return value <= (before - _COOLER_C if kind == HEAT else before * _LESS)


def _devices(limits: Limits) -> str:
    return "1 accelerator" if len(limits) == 1 else f"{len(limits)} accelerators"


def _number(kind: str, value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.0f} °C" if kind == HEAT else percent_text(value / 100)


def _words(kind: str, value: float) -> str:
    return f"{'temperature' if kind == HEAT else 'time waited'} {_number(kind, value)}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
