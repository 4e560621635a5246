"""Metrics of steps between two saves, emitted as events for charts: at most one step per second."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from relight.checkpointer.hooks import Hook
from relight.observe import emit

EVERY_S, EMIT_INTERVAL_S = 1.0, 10.0
METRICS_MAX, NAME_MAX = 12, 80


class MetricFeed(Hook):
    """Metric feed of one rank. A step that is not recorded costs one read of the clock."""

    def __init__(self, emits: bool) -> None:
        self._emits = emits
        self._due = self._emitted_s = monotonic()
        self._steps: list[int] = []
        self._metrics: dict[str, list[float | None]] = {}

    def on_step(self, step: int, metrics: Mapping[str, Any], samples: Any) -> None:
        """Record the step."""
        self.add(step, metrics)

    def on_close(self, polite: bool) -> None:
        """Emit the last steps."""
        self.flush()

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Record a step that ended. Metrics on a device are left out, because reading them would synchronise it."""
        now = monotonic()
        if not self._emits or not metrics or now < self._due:
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
        for name, history in self._metrics.items():
            history.append(values.get(name))
        if now - self._emitted_s >= EMIT_INTERVAL_S:
            self.flush()

    def flush(self) -> None:
        """Emit the steps that were not emitted yet."""
        self._emitted_s = monotonic()
        if self._steps:
            steps, metrics, self._steps, self._metrics = self._steps, self._metrics, [], {}
            emit("steps.done", steps=steps, metrics=metrics)


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
