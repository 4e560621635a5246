"""Derives a save's trace from the events of its ranks and agents: rows, the slowest rank, the critical path. Pure.

Each machine has its own monotonic clock. The clocks are aligned at the commit, because all machines see it. So times
between two machines are wrong by as much as one machine sees the commit later than the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from relight.monitoring.files import FileEvent
from relight.observe.spans import PARTS

SPANS_MAX = 200_000
GAP_S = 0.0005
"""Shorter gaps between two stages are not shown."""
HANDOVER = "between"
"""Name of a gap in which no reported stage ran."""


class TraceSpan(NamedTuple):
    """One stage of one rank. Seconds of the reference machine's clock."""

    part: str
    rank: int
    role: str
    host: str
    pid: int
    start: float
    end: float
    time_s: float
    """When it ended, in seconds since the epoch, by that machine's clock."""
    about: str = ""
    """A drain's tier."""

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start


class Leg(NamedTuple):
    """A segment of the critical path."""

    part: str
    rank: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """Return the duration."""
        return self.end - self.start


class SaveTrace(NamedTuple):
    """The trace of one save."""

    store: str
    run: str
    id: str
    step: int
    spans: tuple[TraceSpan, ...]
    path: tuple[Leg, ...]
    slowest: int | None
    """The rank with the part that was ready last; None if no part was ready."""
    slack: dict[int, float]
    """By rank, seconds by which its part was ready before the slowest one."""
    hosts: tuple[str, ...]
    committed: bool

    @property
    def start(self) -> float:
        """Return when the save began."""
        return min(span.start for span in self.spans)

    @property
    def durable_s(self) -> float:
        """Return the seconds from the beginning to the commit, or to the last stage that was reached."""
        return self.path[-1].end - self.start if self.path else 0.0


def saves_in(file_events: Iterable[FileEvent], store: str, run: str) -> dict[str, list[FileEvent]]:
    """Return the events of each save of a run, by the save's id, in the order of each save's first event."""
    by_save: dict[str, list[FileEvent]] = {}
    count = 0
    for event in file_events:
        if (event.head.store, event.head.run) != (store, run) or event.name not in ("save.span", "drain.done"):
            continue
        id_ = event.fields.get("id")
        if isinstance(id_, str) and 0 < len(id_) < 80 and count < SPANS_MAX:
            by_save.setdefault(id_, []).append(event)
            count += 1
    return {id_: events for id_, events in by_save.items() if any(event.name == "save.span" for event in events)}


def trace_of(store: str, run: str, id_: str, file_events: Iterable[FileEvent]) -> SaveTrace | None:
    """Return the trace of one save from its events; None without a usable event."""
    events = list(file_events)
    spans = [span for event in events if (span := _span(event)) is not None]
    if not spans:
        return None
    spans = _aligned(_once(spans))
    spans.sort(key=lambda span: (span.start, span.rank, PARTS.index(span.part)))
    ready = {span.rank: span.end for span in spans if span.part == "parts"}
    slowest = max(ready, key=lambda rank: (ready[rank], rank)) if ready else None
    slack = {rank: ready[slowest] - end for rank, end in sorted(ready.items())} if slowest is not None else {}
    steps = [event.fields["step"] for event in events if type(event.fields.get("step")) is int]
    path = tuple(_joined(_path([span for span in spans if span.rank == slowest or slowest is None])))
    committed = any(span.part == "commit" for span in spans)
    hosts = tuple(sorted({span.host for span in spans}))
    return SaveTrace(store, run, id_, steps[0] if steps else -1, tuple(spans), path, slowest, slack, hosts, committed)


def _span(event: FileEvent) -> TraceSpan | None:
    head, fields = event.head, event.fields
    if event.name == "drain.done":
        seconds, end = fields.get("seconds"), event.time_s + head.offset_s
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            return None
        return TraceSpan(
            "drain", 0, "drain", head.host, head.pid, end - seconds, end, event.time_s, str(fields.get("tier", ""))[:64]
        )
    part, began, ended, rank = fields.get("span"), fields.get("start"), fields.get("end"), fields.get("rank", head.rank)
    if (
        part not in PARTS
        or type(rank) is not int
        or not isinstance(began, (int, float))
        or not isinstance(ended, (int, float))
    ):
        return None
    if not (math.isfinite(began) and math.isfinite(ended) and began <= ended):
        return None
    return TraceSpan(str(part), rank, head.role, head.host, head.pid, float(began), float(ended), event.time_s)


def _once(spans: list[TraceSpan]) -> list[TraceSpan]:
    """Return the spans with each drain once: every rank that receives the event reports it."""
    seen_drains: set[str] = set()
    unique = []
    for span in spans:
        if span.part == "drain":
            if span.about in seen_drains:
                continue
            seen_drains.add(span.about)
        unique.append(span)
    return unique


def _aligned(spans: list[TraceSpan]) -> list[TraceSpan]:
    """Shift all spans to the clock of a machine that saw the commit.

    Machines without a commit are aligned by their wall clocks.
    """
    by_host: dict[str, list[TraceSpan]] = {}
    for span in spans:
        by_host.setdefault(span.host, []).append(span)
    if len(by_host) == 1:
        return spans
    commit_ends = {
        host: min((span.end for span in host_spans if span.part == "commit"), default=None)
        for host, host_spans in by_host.items()
    }
    reference = next((host for host in sorted(by_host) if commit_ends[host] is not None), sorted(by_host)[0])
    wall = {host: host_spans[0].time_s - host_spans[0].end for host, host_spans in by_host.items()}
    aligned = []
    for host, host_spans in by_host.items():
        at_host, at_reference = commit_ends[host], commit_ends[reference]
        shift = (
            at_reference - at_host if at_host is not None and at_reference is not None else wall[host] - wall[reference]
        )
        aligned += [span._replace(start=span.start + shift, end=span.end + shift) for span in host_spans]
    return aligned


def _path(spans: list[TraceSpan]) -> Iterator[Leg]:
    """Yield the path from the beginning to the commit along one rank.

    Each moment belongs to the earliest stage that had not ended.
    """
    stages = sorted(
        (span for span in spans if span.part != "drain"), key=lambda span: (PARTS.index(span.part), span.start)
    )
    reached = min((span.start for span in stages), default=0.0)
    for span in stages:
        if span.end <= reached:
            continue
        if span.start - reached > GAP_S:
            yield Leg(HANDOVER, span.rank, reached, span.start)
        yield Leg(span.part, span.rank, max(reached, span.start) if span.start - reached > GAP_S else reached, span.end)
        reached = span.end


def _joined(legs: Iterable[Leg]) -> Iterator[Leg]:
    """Join adjacent legs of one stage."""
    before: Leg | None = None
    for leg in legs:
        if before is not None and before.part == leg.part and before.end == leg.start:
            before = before._replace(end=leg.end)
            continue
        if before is not None:
            yield before
        before = leg
    if before is not None:
        yield before


def as_value(trace: SaveTrace) -> dict[str, Any]:
    """Return a trace for ``--json``. Times are seconds since the save began."""
    start = trace.start
    return {
        "store": trace.store, "run": trace.run, "id": trace.id, "step": trace.step, "committed": trace.committed,
        "hosts": list(trace.hosts), "durable_s": round(trace.durable_s, 6), "slowest_rank": trace.slowest,
        "slack_s": {str(rank): round(seconds, 6) for rank, seconds in trace.slack.items()},
        "critical_path": [
            {"part": leg.part, "rank": leg.rank, "start_s": round(leg.start - start, 6), "seconds": round(leg.seconds, 6)}
            for leg in trace.path
        ],
        "spans": [
            {
                "part": span.part, "rank": span.rank, "role": span.role, "host": span.host, "pid": span.pid,
                "start_s": round(span.start - start, 6), "seconds": round(span.seconds, 6), **({"tier": span.about} if span.about else {}),
            }
            for span in trace.spans
        ],
    }  # fmt: skip
