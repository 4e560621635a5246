"""Serves the runs' metrics to Prometheus. The process that polls the runs computes them at each scrape."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from relight.errors import ConfigError, extra_hint
from relight.monitoring.event_metrics import MetricSample
from relight.monitoring.overview import RunSeen
from relight.observe.metrics import COUNTER, GAUGE, METRICS, SECONDS
from relight.run_names import run_name

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
FRESH_S = 1.0
"""Seconds within which scrapes share one poll, so that frequent scrapes do not load the stores."""


def need_client() -> None:
    """Raise ``ConfigError`` that names the extra to install, if the library is missing."""
    try:
        import prometheus_client  # noqa: F401
    except ModuleNotFoundError:
        raise ConfigError("metrics need prometheus-client", hint=extra_hint("metrics")) from None


class Collector:
    """Collector for ``prometheus_client``'s registry: the metrics of the runs that ``poll`` returns."""

    def __init__(self, poll: Callable[[float], Sequence[RunSeen]], clock: Callable[[], float] = time.time) -> None:
        need_client()
        self._poll, self._clock = poll, clock
        self._lock = threading.Lock()
        self._seen: Sequence[RunSeen] = ()
        self._at = -1e18

    def collect(self) -> Iterator[Family]:
        """Yield all metrics with samples, in the order of their definitions."""
        with self._lock:
            if abs(self._clock() - self._at) > FRESH_S:
                self._at = self._clock()
                self._seen = self._poll(self._at)
            seen = self._seen
        yield from families(seen)

    def text(self) -> bytes:
        """Return the page of metrics."""
        from prometheus_client import CollectorRegistry, generate_latest

        registry = CollectorRegistry(auto_describe=False)
        registry.register(_Once(list(self.collect())))  # type: ignore[arg-type] # the registry calls only ``collect``
        return bytes(generate_latest(registry))


class _Once:
    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = metrics

    def collect(self) -> list[Any]:
        """Return the metrics."""
        return self._metrics

    def describe(self) -> list[Any]:
        """Return nothing: names are checked where they are defined."""
        return []


def families(runs: Iterable[RunSeen]) -> Iterator[Family]:
    """Yield the library's families, one for each metric."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

    by_name: dict[str, list[tuple[tuple[str, ...], MetricSample]]] = {}
    for run in runs:
        for sample in run.samples:
            by_name.setdefault(sample.metric.name, []).append(((run.store, run_name(run.run), *sample.labels), sample))
    for metric in METRICS:
        if metric.name not in by_name:
            continue
        if metric.kind == GAUGE:
            family: Any = GaugeMetricFamily(metric.name, metric.help, labels=metric.all_labels)
        elif metric.kind == COUNTER:
            family = CounterMetricFamily(metric.name, metric.help, labels=metric.all_labels)
        else:
            family = HistogramMetricFamily(metric.name, metric.help, labels=metric.all_labels)
        for labels, sample in by_name[metric.name]:
            clean = ["".join(char if char.isprintable() else ascii(char)[1:-1] for char in label) for label in labels]
            if sample.counts:
                family.add_metric(clean, buckets=_cumulative(sample.counts), sum_value=sample.value)
            else:
                family.add_metric(clean, sample.value)
        yield family


def _cumulative(counts: Sequence[int]) -> list[tuple[str, float]]:
    total, buckets = 0, []
    for bound, count in zip([*(repr(bound) for bound in SECONDS), "+Inf"], counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets
