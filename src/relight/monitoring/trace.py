"""A save's way across ranks and agents, put together from what each process told: lanes, the slowest rank, the critical path. Pure.

Times are of each machine's monotonic clock. Machines are aligned where all of them see the same: at the commit. So what lies between two
machines is as exact as they are fast to see it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from relight.monitoring.files import Heard
from relight.observe.spans import PARTS

SPANS_MAX = 200_000
GAP_S = 0.0005
"""Shorter pauses between two parts are not told."""
HANDOVER = "between"
"""In place of a part: nothing was under way that was told of."""


class TraceSpan(NamedTuple):
    """One part, of one rank. Seconds of the reference machine's clock."""

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
        """How long it took."""
        return self.end - self.start


class Leg(NamedTuple):
    """A stretch of the critical path."""

    part: str
    rank: int
    start: float
    end: float

    @property
    def seconds(self) -> float:
        """How long it is."""
        return self.end - self.start


class SaveTrace(NamedTuple):
    """One save."""

    store: str
    run: str
    id: str
    step: int
    spans: tuple[TraceSpan, ...]
    path: tuple[Leg, ...]
    slowest: int | None
    """The rank whose part was ready last; None if no part was."""
    slack: dict[int, float]
    """By rank: how much earlier than the slowest its part was ready."""
    hosts: tuple[str, ...]
    committed: bool

    @property
    def start(self) -> float:
        """When it began."""
        return min(span.start for span in self.spans)

    @property
    def durable_s(self) -> float:
        """From its beginning to the commit, or as far as it came."""
        return self.path[-1].end - self.start if self.path else 0.0


def saves_in(heard: Iterable[Heard], store: str, run: str) -> dict[str, list[Heard]]:
    """What was told of each save of a run, by its id, in the order in which they began to be told of."""
    found: dict[str, list[Heard]] = {}
    count = 0
    for one in heard:
        if (one.head.store, one.head.run) != (store, run) or one.name not in ("save.span", "drain.done"):
            continue
        id_ = one.fields.get("id")
        if isinstance(id_, str) and 0 < len(id_) < 80 and count < SPANS_MAX:
            found.setdefault(id_, []).append(one)
            count += 1
    return {id_: told for id_, told in found.items() if any(one.name == "save.span" for one in told)}


def trace_of(store: str, run: str, id_: str, heard: Iterable[Heard]) -> SaveTrace | None:
    """Put together what was told of one save; None if nothing of use was."""
    told = list(heard)
    spans = [span for one in told if (span := _span(one)) is not None]
    if not spans:
        return None
    spans = _aligned(_once(spans))
    spans.sort(key=lambda span: (span.start, span.rank, PARTS.index(span.part)))
    ready = {span.rank: span.end for span in spans if span.part == "parts"}
    slowest = max(ready, key=lambda rank: (ready[rank], rank)) if ready else None
    slack = {rank: ready[slowest] - at for rank, at in sorted(ready.items())} if slowest is not None else {}
    steps = [one.fields["step"] for one in told if type(one.fields.get("step")) is int]
    path = tuple(_joined(_path([span for span in spans if span.rank == slowest or slowest is None])))
    committed = any(span.part == "commit" for span in spans)
    hosts = tuple(sorted({span.host for span in spans}))
    return SaveTrace(store, run, id_, steps[0] if steps else -1, tuple(spans), path, slowest, slack, hosts, committed)


def _span(one: Heard) -> TraceSpan | None:
    head, fields = one.head, one.fields
    if one.name == "drain.done":
        seconds, end = fields.get("seconds"), one.time_s + head.offset_s
        if not isinstance(seconds, (int, float)) or not 0 <= seconds < math.inf:
            return None
        return TraceSpan("drain", 0, "drain", head.host, head.pid, end - seconds, end, one.time_s, str(fields.get("tier", ""))[:64])
    part, began, ended, rank = fields.get("span"), fields.get("start"), fields.get("end"), fields.get("rank", head.rank)
    if part not in PARTS or type(rank) is not int or not isinstance(began, (int, float)) or not isinstance(ended, (int, float)):
        return None
    if not (math.isfinite(began) and math.isfinite(ended) and began <= ended):
        return None
    return TraceSpan(str(part), rank, head.role, head.host, head.pid, float(began), float(ended), one.time_s)


def _once(spans: list[TraceSpan]) -> list[TraceSpan]:
    """A drain is told of by each rank that hears of it."""
    seen: set[str] = set()
    kept = []
    for span in spans:
        if span.part == "drain":
            if span.about in seen:
                continue
            seen.add(span.about)
        kept.append(span)
    return kept


def _aligned(spans: list[TraceSpan]) -> list[TraceSpan]:
    """On the clock of the machine that saw the commit first by itself; one that saw none is put where its wall clock says."""
    by_host: dict[str, list[TraceSpan]] = {}
    for span in spans:
        by_host.setdefault(span.host, []).append(span)
    if len(by_host) == 1:
        return spans
    seen = {host: min((span.end for span in own if span.part == "commit"), default=None) for host, own in by_host.items()}
    reference = next((host for host in sorted(by_host) if seen[host] is not None), sorted(by_host)[0])
    wall = {host: own[0].time_s - own[0].end for host, own in by_host.items()}
    found = []
    for host, own in by_host.items():
        here, there = seen[host], seen[reference]
        shift = there - here if here is not None and there is not None else wall[host] - wall[reference]
        found += [span._replace(start=span.start + shift, end=span.end + shift) for span in own]
    return found


def _path(spans: list[TraceSpan]) -> Iterator[Leg]:
    """From the beginning to the commit, along one rank: each moment counts for the earliest part of the way that was not over yet."""
    way = sorted((span for span in spans if span.part != "drain"), key=lambda span: (PARTS.index(span.part), span.start))
    at = min((span.start for span in way), default=0.0)
    for span in way:
        if span.end <= at:
            continue
        if span.start - at > GAP_S:
            yield Leg(HANDOVER, span.rank, at, span.start)
        yield Leg(span.part, span.rank, max(at, span.start) if span.start - at > GAP_S else at, span.end)
        at = span.end


def _joined(legs: Iterable[Leg]) -> Iterator[Leg]:
    """What one part does in two goes is one leg."""
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
    """For ``--json``: times are seconds since the save began."""
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
