"""Events, reported once: to Python logging, to files that other processes read, and to subscribers; counters of events;
the definitions of all metrics. May import: ``errors``, ``settings``."""

from relight.observe.events import EVENTS, Event, counters, demote_info_logs, emit, subscribe
from relight.observe.file import events_directory, flush_events, write_events
from relight.observe.metrics import METRICS, Metric
from relight.observe.spans import record_span

__all__ = [
    "EVENTS",
    "METRICS",
    "Event",
    "Metric",
    "counters",
    "demote_info_logs",
    "emit",
    "events_directory",
    "flush_events",
    "record_span",
    "subscribe",
    "write_events",
]  # fmt: skip
