"""Timelines: one row for each rank or run, such as the phases of a save by rank."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.line import ticks
from relight.serve.draw.svg import element, fitting, picture, text

WIDTH = 960
_LEFT, _RIGHT, _LANE, _FOOT = 96, 14, 32, 24
_LANES_MAX = 64


@dataclass(frozen=True)
class TimeRange:
    """A time range in a row."""

    kind: str
    """The phase, which is also the CSS class of its colour."""
    begin_s: float
    end_s: float
    tooltip: str


@dataclass(frozen=True)
class RankRow:
    """Time ranges of a rank or run."""

    name: str
    spans: Sequence[TimeRange]


def lanes(rows: Sequence[RankRow], description: str, unit: str = "s") -> Markup:
    """Return a timeline: one row for each of ``rows``, time from left to right."""
    shown = rows[:_LANES_MAX]
    spans = [span for row in shown for span in row.spans if math.isfinite(span.begin_s) and math.isfinite(span.end_s)]
    first, last = min((span.begin_s for span in spans), default=0.0), max((span.end_s for span in spans), default=1.0)
    length = max(last - first, 1e-9)
    height = _LANE * max(len(shown), 1) + _FOOT
    wide = WIDTH - _LEFT - _RIGHT

    def across(second: float) -> float:
        return _LEFT + wide * (second - first) / length

    parts = []
    for tick in ticks(0.0, length, 8):
        x = across(first + tick)
        parts.append(element("line", x1=x, x2=x, y1=0, y2=height - _FOOT, klass="grid"))
        parts.append(text(x, height - 7, f"{tick:.3g} {unit}", klass="tick", anchor="middle"))
    for index, row in enumerate(shown):
        y = index * _LANE
        parts.append(text(_LEFT - 8, y + _LANE / 2 + 4, fitting(row.name, _LEFT - 12), klass="tick", anchor="end"))
        placed = _tracks(row.spans)
        tall = (_LANE - 6) / max((track + 1 for _, track in placed), default=1)
        for span, track in placed:
            width = max(wide * (span.end_s - span.begin_s) / length, 4.0 if span.kind == "failure" else 1.5)
            inside = [
                element("title", f"{row.name}, {span.kind}: {span.tooltip}"),
                element(
                    "rect",
                    x=across(span.begin_s),
                    y=y + 3 + track * tall,
                    width=width,
                    height=tall - 0.5,
                    klass=f"span {span.kind}",
                ),
            ]
            if tall > 11 and fitting(span.kind, width - 8) == span.kind:
                inside.append(
                    text(across(span.begin_s) + 5, y + 3 + track * tall + tall / 2 + 4, span.kind, klass="on")
                )
            parts.append(element("g", *inside))
    if len(rows) > len(shown):
        parts.append(text(_LEFT, height - 7, f"and {len(rows) - len(shown)} lanes more", klass="tick"))
    return picture(WIDTH, height, description, parts, "lanes")


def _tracks(spans: Sequence[TimeRange]) -> list[tuple[TimeRange, int]]:
    """Return each span with the first of three tracks in which it overlaps no earlier span; the third track if all do."""
    ends = [-math.inf] * 3
    placed = []
    for span in sorted(
        (span for span in spans if math.isfinite(span.begin_s) and math.isfinite(span.end_s)),
        key=lambda span: span.begin_s,
    ):
        track = next((index for index, end in enumerate(ends) if end <= span.begin_s), 2)
        ends[track] = max(ends[track], span.end_s)
        placed.append((span, track))
    return placed
