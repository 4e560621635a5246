"""Metrics of steps between two saves, emitted as events for charts: each of the first 10,000 steps, later fewer."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from relight.checkpointer.hooks import Hook
from relight.observe import emit

EVERY_S, EMIT_INTERVAL_S = 1.0, 10.0
"""At least one step in ``EVERY_S`` seconds is recorded. Recorded steps are emitted after ``EMIT_INTERVAL_S`` seconds at the latest."""
STEPS_WHOLE = 10_000
"""Steps of a process that are all recorded. Then every second step is, from twice as many on every third, and so on."""
NUMBERS_MAX = 520
"""Numbers of one event, so that it fits into a line of the event file (16 KiB)."""
METRICS_MAX, NAME_MAX = 12, 80


class MetricFeed(Hook):
    """Metric feed of one rank. A step that is not recorded costs one read of the clock."""

    def __init__(self, emits: bool) -> None:
        self._emits = emits
        self._due = self._emitted_s = monotonic()
        self._count = 0
        self._steps: list[int] = []
        self._times: list[float] = []
        self._metrics: dict[str, list[float | None]] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Record the step."""
        self.add(step, metrics)

    def on_close(self, polite: bool) -> None:
        """Emit the last steps."""
        self.flush()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that ended. Metrics on a device are left out, because reading them would synchronise it."""
        if not self._emits or not metrics:
            return
        now = monotonic()
        self._count += 1
        if self._count % (self._count // STEPS_WHOLE + 1) and now < self._due:
            return
        self._due = now + EVERY_S
        values = {
            name: value
            for name, metric in metrics.items()
            if len(name) <= NAME_MAX and (value := _here(metric)) is not None
        }
        if not values:
            return
        for name in list(values)[:METRICS_MAX]:
            if name in self._metrics or len(self._metrics) < METRICS_MAX:
                self._metrics.setdefault(name, [None] * len(self._steps))
        self._steps.append(step)
        self._times.append(now)
        for name, history in self._metrics.items():
            history.append(values.get(name))
        if now - self._emitted_s >= EMIT_INTERVAL_S or len(self._steps) * (len(self._metrics) + 1) >= NUMBERS_MAX:
            self.flush()

    def flush(self) -> None:
        """Emit the steps that were not emitted yet."""
        self._emitted_s = now = monotonic()
        if self._steps:
            ages = [round(now - time_s, 2) for time_s in self._times]
            steps, metrics, self._steps, self._metrics, self._times = self._steps, self._metrics, [], {}, []
            emit("steps.done", steps=steps, ages=ages, metrics=metrics)


def _here(value: Any) -> float | None:
    """Return the metric as a float; None if it is not a number, is too large, or is on a device."""
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 else None
    device = getattr(value, "device", None)
    if getattr(value, "ndim", None) != 0 or (device is not None and getattr(device, "type", "cpu") != "cpu"):
        return None
    try:
        number = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return number if abs(number) < 1e300 else None
