"""Line charts over steps with marks, such as a loss with checkpoints and incidents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup

from relight.serve.downsample import largest_triangles
from relight.serve.draw.svg import element, link, picture, text
from relight.units import compact_text

WIDTH, HEIGHT = 600, 230
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 30
_POINTS_MAX = 600


@dataclass(frozen=True)
class Curve:
    """A series. NaN and infinite values are left out, and the line spans the gap."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


class Mark(NamedTuple):
    """An event at an ``x``."""

    x: float
    tooltip: str
    kind: str
    """``checkpoint`` or ``damaged``, a triangle below, or ``incident``, a diamond on a line."""
    href: str = ""


def line(curves: Sequence[Curve], marks: Sequence[Mark], description: str, *, log: bool = False) -> Markup:
    """Return a chart with axes, curves and marks. A curve of one point is a dot. ``log``: logarithmic values, without those up to 0."""
    thin = [thinned(logarithms(curve) if log else curve) for curve in curves]
    xs = [x for curve in thin for x in curve.x] + [mark.x for mark in marks if math.isfinite(mark.x)]
    ys = [y for curve in thin for y in curve.y]
    x_low, x_high = _span(xs)
    y_low, y_high = _span(ys)
    wide, tall = WIDTH - _LEFT - _RIGHT, HEIGHT - _TOP - _BOTTOM

    def across(x: float) -> float:
        return _LEFT + wide * (x - x_low) / (x_high - x_low)

    def down(y: float) -> float:
        return _TOP + tall * (1 - (y - y_low) / (y_high - y_low))

    parts = []
    for tick in ticks(y_low, y_high, 4) if ys else []:
        parts.append(element("line", x1=_LEFT, x2=WIDTH - _RIGHT, y1=down(tick), y2=down(tick), klass="grid"))
        parts.append(
            text(_LEFT - 8, down(tick) + 4, compact_text(10**tick if log else tick), klass="tick", anchor="end")
        )
    for tick in ticks(x_low, x_high, 7) if xs else []:
        parts.append(text(across(tick), HEIGHT - 8, compact_text(tick), klass="tick", anchor="middle"))
    for index, curve in enumerate(thin):
        title, kind = element("title", curve.name), f"of-{index % 8}"
        places = [(across(x), down(y)) for x, y in zip(curve.x, curve.y)]
        if len(places) == 1:
            parts.append(element("circle", title, cx=places[0][0], cy=places[0][1], r=3.5, klass=f"point {kind}"))
        elif places:
            path = "M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in places)
            parts.append(element("path", title, d=path, klass=f"curve {kind}"))
    foot = HEIGHT - _BOTTOM
    for mark in marks:
        if not math.isfinite(mark.x):
            continue
        x, title = across(mark.x), element("title", mark.tooltip)
        if mark.kind == "incident":
            shape = [
                element("line", x1=x, x2=x, y1=_TOP, y2=foot),
                element("path", d=f"M{x:.1f} {_TOP - 6}l6 6l-6 6l-6-6z"),
            ]
        else:
            shape = [element("path", d=f"M{x:.1f} {foot - 9}l5 9h-10z")]
        inside = element("g", title, *shape, klass=f"mark {mark.kind}")
        parts.append(link([inside], mark.href) if mark.href else inside)
    return picture(WIDTH, HEIGHT, description, parts, "line")


def ticks(low: float, high: float, about: int) -> list[float]:
    """Return about ``about`` round numbers from ``low`` to ``high``, in steps of 1, 2 or 5 times a power of ten."""
    width = high - low
    if not (math.isfinite(width) and width > 0):
        return []
    power = 10.0 ** math.floor(math.log10(width / about))
    step = next(power * times for times in (1, 2, 5, 10) if width / (power * times) <= about)
    first = math.ceil(low / step)
    return [index * step for index in range(first, first + 2 * about + 2) if index * step <= high + step * 1e-9]


def _span(values: Sequence[float]) -> tuple[float, float]:
    if not values:
        return 0.0, 1.0
    low, high = min(values), max(values)
    if not high - low > 1e-12 * max(abs(low), abs(high), 1e-300):
        half = abs(low) / 2 or 0.5
        return low - half, high + half
    margin = (high - low) * 0.04
    return low - margin, high + margin


def thinned(curve: Curve, points: int = _POINTS_MAX) -> Curve:
    """Return the curve's finite points, downsampled to at most ``points``."""
    finite = [(x, y) for x, y in zip(curve.x, curve.y) if math.isfinite(x) and math.isfinite(y)]
    kept = [finite[index] for index in largest_triangles([x for x, _ in finite], [y for _, y in finite], points)]
    return Curve(curve.name, [x for x, _ in kept], [y for _, y in kept])


def logarithms(curve: Curve) -> Curve:
    """Return the curve of the decimal logarithms; NaN for values up to 0."""
    return Curve(curve.name, curve.x, [math.log10(y) if math.isfinite(y) and y > 0 else math.nan for y in curve.y])
