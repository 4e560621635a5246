"""Reduces this node's load while it is too hot or under pressure.

Restores the load when the reading falls, or if the reduction does not help.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from relight.observe import emit
from relight.prediction import Alarm
from relight.prediction.sample import NodeSample

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


class Power(Protocol):
    """Accelerators with adjustable power limits."""

    def lower_power(self, share: float) -> list[tuple[float, float]]:
        """Lower each device's limit to that share. Return the watts before and after of each device that allows it."""
        ...

    def restore_power(self) -> None:
        """Give each device the limit that it had."""
        ...


class _Reduced(NamedTuple):
    kind: str
    at: float
    before: float


class Load:
    """The load of one node. Used from one thread.

    ``pause``: share of the time that ranks pause. ``ease`` publishes that share to the ranks until a time, or withdraws
    it with 0. ``power``: None if power limits must stay unchanged.
    """

    def __init__(
        self, pause: float, ease: Callable[[float, float], bool], power: Power | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pause, self._ease, self._power, self._clock = pause, ease, power, clock
        self._now: _Reduced | None = None
        self._low_since: float | None = None
        self._useless: dict[str, float] = {}
        """By kind, the time of the last load reduction that did not help."""

    def reduce(self, alarm: Alarm, sample: NodeSample) -> bool:
        """Reduce the load. Return whether anything was done: only in that case may the alarm count as acted on."""
        now = self._clock()
        if self._now is not None:
            return alarm.kind == self._now.kind  # an alarm of another kind may need another action
        if alarm.kind not in KINDS or now - self._useless.get(alarm.kind, -math.inf) < QUIET_S:
            return False
        done = []
        if self._pause and self._ease(self._pause, now + RENEW_S):
            done.append(f"ranks pause {100 * self._pause:.0f} % of the time")
        if alarm.kind == HEAT and self._power is not None and (limits := self._power.lower_power(_POWER)):
            devices = "1 accelerator" if len(limits) == 1 else f"{len(limits)} accelerators"
            done.append(f"power limit of {devices} {limits[0][0]:.0f} → {limits[0][1]:.0f} W")
        if not done:
            return False
        self._now, self._low_since = _Reduced(alarm.kind, now, reading_of(alarm.kind, sample)), None
        text = f"load reduced: {'; '.join(done)}; {_words(alarm.kind, self._now.before)}"
        emit("run.load", text, kind=alarm.kind, action="reduced", reading_before=_known(self._now.before), reading_after=None)
        return True

    def update(self, sample: NodeSample) -> None:
        """Process each second's reading. Restore the load once it has stayed low, or has not fallen in time."""
        if self._now is None:
            return
        now, value = self._clock(), reading_of(self._now.kind, sample)
        if not is_low(self._now.kind, self._now.before, value):
            self._low_since = None
        elif self._low_since is None:
            self._low_since = now
        if self._low_since is not None and now - self._low_since >= HOLDS_S:
            self._restore(value, "")
        elif self._low_since is None and now - self._now.at >= TRY_S:
            self._useless[self._now.kind] = now
            self._restore(value, ", because it did not help")
        elif self._pause:
            self._ease(self._pause, now + RENEW_S)

    def close(self) -> None:
        """Restore the load, whatever the reading is."""
        if self._now is not None:
            self._restore(math.nan, ", because the job ends")

    def _restore(self, value: float, why: str) -> None:
        assert self._now is not None
        reduction, self._now = self._now, None
        self._ease(0.0, 0.0)
        if self._power is not None:
            self._power.restore_power()
        readings = f"{_words(reduction.kind, reduction.before)}, now {_number(reduction.kind, value)}"
        text = f"load restored after {self._clock() - reduction.at:.0f} s{why}: {readings}"
        emit("run.load", text, kind=reduction.kind, action="restored", reading_before=_known(reduction.before), reading_after=_known(value))


def reading_of(kind: str, sample: NodeSample) -> float:
    """Return the reading that less load can lower.

    It is the hottest accelerator's temperature in °C, or the share of time in per cent that processes waited.
    """
    host = sample.host
    values = [accelerator.temperature_c for accelerator in sample.accelerators] if kind == HEAT else [host.psi_cpu_some, host.psi_io_full]
    return max((value for value in values if not math.isnan(value)), default=math.nan)


def is_low(kind: str, before: float, value: float) -> bool:
    """Return whether a reading has fallen far enough below the one before. An unknown reading has not."""
    return value <= (before - _COOLER_C if kind == HEAT else before * _LESS)


def _number(kind: str, value: float) -> str:
    if math.isnan(value):
        return "unknown"
    return f"{value:.0f} °C" if kind == HEAT else f"{value:.0f} %"


def _words(kind: str, value: float) -> str:
    return f"{'temperature' if kind == HEAT else 'time waited'} {_number(kind, value)}"


def _known(value: float) -> float | None:
    return None if math.isnan(value) else round(value, 3)
