"""What training tells of its steps between two saves: a step a second at most, for whoever draws the curve."""

from __future__ import annotations

from collections.abc import Mapping
from time import monotonic
from typing import Any

from relight.observe import emit

EVERY_S, TELL_S = 1.0, 10.0
METRICS_MAX, NAME_MAX = 12, 80


class MetricFeed:
    """Of one rank. Cost of a step that is not told: a look at the clock."""

    def __init__(self, tells: bool) -> None:
        self._tells = tells
        self._due = self._told = monotonic()
        self._steps: list[int] = []
        self._metrics: dict[str, list[float | None]] = {}

    def add(self, step: int, metrics: Mapping[str, Any]) -> None:
        """One step has ended. Of its metrics those count that are here: what is on a device is not waited for."""
        now = monotonic()
        if not self._tells or not metrics or now < self._due:
            return
        self._due = now + EVERY_S
        values = {name: value for name, one in metrics.items() if len(name) <= NAME_MAX and (value := _here(one)) is not None}
        if not values:
            return
        for name in list(values)[:METRICS_MAX]:
            if name in self._metrics or len(self._metrics) < METRICS_MAX:
                self._metrics.setdefault(name, [None] * len(self._steps))
        self._steps.append(step)
        for name, held in self._metrics.items():
            held.append(values.get(name))
        if now - self._told >= TELL_S:
            self.flush()

    def flush(self) -> None:
        """Say what has not been said yet."""
        self._told = monotonic()
        if self._steps:
            steps, metrics, self._steps, self._metrics = self._steps, self._metrics, [], {}
            emit("steps.done", steps=steps, metrics=metrics)


def _here(value: Any) -> float | None:
    """A number without waiting for a device; None for what is none, or is elsewhere."""
    if isinstance(value, int | float):
        return float(value) if abs(value) < 1e300 else None
    device = getattr(value, "device", None)
    if getattr(value, "ndim", None) != 0 or (device is not None and getattr(device, "type", "cpu") != "cpu"):
        return None
    try:
        found = float(value.detach() if hasattr(value, "detach") else value)
    except (TypeError, ValueError, RuntimeError):
        return None
    return found if abs(found) < 1e300 else None
