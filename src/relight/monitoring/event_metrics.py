"""Computes metrics from each run's events. Pure."""

from __future__ import annotations

import logging
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from relight.monitoring.files import FileEvent
from relight.observe.events import EVENTS
from relight.observe.metrics import COUNTER, HISTOGRAM, OF_EVENT, SECONDS, Metric, MetricSource

ONCE_MAX = 10_000
"""Events that are remembered as counted."""
LABEL_VALUES_MAX = 50
"""Most values of a label; further ones become ``other``."""
TIMES_MAX = 1000
RECENT_MAX = 200
SKIPPED = ("restore.skipped", "scrub.damaged", "verify.damaged")
"""Events that report that a checkpoint is not good."""


class MetricSample(NamedTuple):
    """One sample of a metric. For a histogram: ``counts`` of its buckets, and the sum in ``value``."""

    metric: Metric
    labels: tuple[str, ...]
    value: float
    counts: tuple[int, ...] = ()


class DurableSave(NamedTuple):
    """A save that became durable."""

    time_s: float
    step: int
    id: str
    seconds: float
    blocked_s: float
    bytes: int


@dataclass(slots=True)
class Tally:
    """The accumulated events of one run."""

    sums: dict[tuple[str, tuple[str, ...]], float] = field(default_factory=dict)
    buckets: dict[tuple[str, tuple[str, ...]], list[int]] = field(default_factory=dict)
    levels: dict[str, int] = field(default_factory=dict)
    saves: deque[DurableSave] = field(default_factory=lambda: deque(maxlen=TIMES_MAX))
    recent: deque[FileEvent] = field(default_factory=lambda: deque(maxlen=RECENT_MAX))
    """Events of level info and above, oldest first."""
    damaged: dict[str, tuple[str, float]] = field(default_factory=dict)
    """Checkpoints that are not good, and why."""
    risk: tuple[float, float, str] = (0.0, 0.0, "")
    """The latest alarm: its time, score and reason."""
    failed_since: tuple[int, float] = (0, 0.0)
    """Failed saves since the last successful one, and the time of the last of them."""
    failures: deque[tuple[float, str]] = field(default_factory=lambda: deque(maxlen=TIMES_MAX))
    """Time and kind of the job's failures."""
    blocked_prunes: tuple[int, float, str] = (0, 0.0, "")
    """Failures of retention since it last worked, the time of the last one, its reason."""
    ended_at: float | None = None
    """When a process reported the normal end of the run's last attempt; None if none has."""
    last_event_at: float = 0.0
    """Time of the newest event."""
    _once: dict[tuple[Any, ...], None] = field(default_factory=dict)
    _values: dict[str, set[str]] = field(default_factory=dict)

    def add(self, event: FileEvent) -> None:
        """Count one event."""
        level = EVENTS.get(event.name, (logging.INFO, ""))[0]
        name = logging.getLevelName(level).lower()
        self.levels[name] = self.levels.get(name, 0) + 1
        self.last_event_at = max(self.last_event_at, event.time_s)
        if level >= logging.INFO:
            self.recent.append(event)
        for metric in OF_EVENT.get(event.name, ()):
            self._count(metric, event)
        self._notice(event)

    def samples(self) -> Iterator[MetricSample]:
        """Yield the present samples."""
        for (name, labels), value in self.sums.items():
            metric = _BY_NAME[name]
            yield MetricSample(metric, labels, value, tuple(self.buckets.get((name, labels), ())))

    def _count(self, metric: Metric, event: FileEvent) -> None:
        derivation, fields = metric.made, event.fields
        assert derivation is not None
        value = _value(derivation, fields)
        if value is None or (derivation.once and not self._is_first(metric, derivation, fields)):
            return
        key = metric.name, tuple(self._label(metric, label, fields) for label in metric.labels)
        self.sums[key] = self.sums.get(key, 0.0) + value
        if metric.kind == HISTOGRAM:
            counts = self.buckets.setdefault(key, [0] * (len(SECONDS) + 1))
            counts[bisect_left(SECONDS, value)] += 1
        else:
            assert metric.kind == COUNTER

    def _is_first(self, metric: Metric, made: MetricSource, fields: dict[str, Any]) -> bool:
        key = (metric.name, *(str(fields.get(name))[:100] for name in made.once))
        if key in self._once:
            return False
        self._once[key] = None
        while len(self._once) > ONCE_MAX:
            del self._once[next(iter(self._once))]
        return True

    def _label(self, metric: Metric, label: str, fields: dict[str, Any]) -> str:
        text = str(fields.get(metric.field_of(label), ""))[:64]
        labels = self._values.setdefault(f"{metric.name} {label}", set())
        if text not in labels and len(labels) >= LABEL_VALUES_MAX:
            return "other"
        labels.add(text)
        return text

    def _notice(self, event: FileEvent) -> None:
        name, fields = event.name, event.fields
        if name == "save.durable":
            if event.head.rank == 0:
                self.saves.append(
                    DurableSave(
                        event.time_s,
                        int(_number(fields, "step")),
                        str(fields.get("id"))[:40],
                        _number(fields, "seconds"),
                        _number(fields, "blocked_s"),
                        int(_number(fields, "bytes")),
                    )
                )
            self.failed_since = (0, 0.0)
        elif name == "save.failed":
            self.failed_since = (self.failed_since[0] + 1, event.time_s)
        elif name in SKIPPED and fields.get("id"):
            self.damaged[str(fields["id"])[:40]] = str(fields.get("message") or name)[:500], event.time_s
            while len(self.damaged) > TIMES_MAX:
                del self.damaged[next(iter(self.damaged))]
        elif name == "verify.done":
            self.damaged.pop(str(fields.get("id"))[:40], None)
        elif name == "prediction.alarm":
            self.risk = (
                event.time_s,
                min(1.0, max(0.0, _number(fields, "score"))),
                str(fields.get("message", ""))[:500],
            )
        elif name == "run.failure":
            self.failures.append((event.time_s, str(fields.get("kind", ""))[:64]))
        elif name == "prune.failed":
            self.blocked_prunes = (self.blocked_prunes[0] + 1, event.time_s, str(fields.get("message", ""))[:500])
        elif name == "prune.done":
            self.blocked_prunes = (0, 0.0, "")
        elif name in ("attempt.started", "attempt.ended"):
            self.ended_at = event.time_s if name == "attempt.ended" else None


def _value(made: MetricSource, fields: dict[str, Any]) -> float | None:
    """Return what an event adds; None if it is not a number, or negative."""
    if not made.field:
        return 1.0
    value = _finite(fields.get(made.field))
    less = _finite(fields.get(made.less)) if made.less else 0.0
    if value is None or less is None or value < less:
        return None
    return value - less


def _finite(value: Any) -> float | None:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) < 2**63 and math.isfinite(value) else None


def _number(fields: dict[str, Any], name: str) -> float:
    return _finite(fields.get(name)) or 0.0


_BY_NAME = {metric.name: metric for metrics in OF_EVENT.values() for metric in metrics}
