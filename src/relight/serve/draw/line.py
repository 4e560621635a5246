"""Line charts over steps with marks, such as a loss with checkpoints and incidents. Also sparklines without axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.svg import element, link, picture, text
from relight.units import compact_text

WIDTH, HEIGHT = 960, 260
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 14, 30
_POINTS_MAX = 600


@dataclass(frozen=True)
class Curve:
    """A series. NaN and infinite values are gaps."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Mark:
    """An event at an ``x``."""

    x: float
    tooltip: str
    kind: str
    """``checkpoint``, a triangle below, or ``incident``, a diamond on a line."""
    href: str = ""


def line(curves: Sequence[Curve], marks: Sequence[Mark], description: str) -> Markup:
    """Return a chart with axes, curves and marks."""
    thin = [thinned(curve) for curve in curves]
    pairs = [(x, y) for curve in thin for x, y in zip(curve.x, curve.y) if math.isfinite(x) and math.isfinite(y)]
    xs = [x for x, _ in pairs] + [mark.x for mark in marks if math.isfinite(mark.x)]
    ys = [y for _, y in pairs]
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
        parts.append(text(_LEFT - 8, down(tick) + 4, compact_text(tick), klass="tick", anchor="end"))
    for tick in ticks(x_low, x_high, 7) if xs else []:
        parts.append(text(across(tick), HEIGHT - 8, compact_text(tick), klass="tick", anchor="middle"))
    for index, curve in enumerate(thin):
        for run in _runs(curve):
            path = "M" + "L".join(f"{across(x):.1f} {down(y):.1f}" for x, y in run)
            parts.append(
                element(
                    "path",
                    element("title", curve.name),
                    d=path if len(run) > 1 else path + "h0.1",
                    klass=f"curve of-{index % 8}",
                )
            )
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


def spark(values: Sequence[float], description: str) -> Markup:
    """Return a small curve without axes."""
    ys = [value for value in values if math.isfinite(value)][-200:]
    low, high = _span(ys)
    if len(ys) < 2:
        return picture(120, 24, description, [], "spark")
    path = "M" + "L".join(
        f"{2 + 116 * i / (len(ys) - 1):.1f} {22 - 20 * (y - low) / (high - low):.1f}" for i, y in enumerate(ys)
    )
    return picture(120, 24, description, [element("path", d=path, klass="curve of-0")], "spark")


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
    """Return a curve of at most ``points`` points: minimum and maximum of each piece, so that no spike is lost."""
    count = min(len(curve.x), len(curve.y))
    if count <= points:
        return curve
    x, y = [], []
    for piece in range(points // 2):
        indices = range(piece * count * 2 // points, (piece + 1) * count * 2 // points)
        finite = [index for index in indices if math.isfinite(curve.y[index])] or list(indices)[:1]
        for index in sorted({min(finite, key=lambda i: curve.y[i]), max(finite, key=lambda i: curve.y[i])}):
            x.append(curve.x[index])
            y.append(curve.y[index])
    return Curve(curve.name, x, y)


def _runs(curve: Curve) -> list[list[tuple[float, float]]]:
    runs: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(curve.x, curve.y):
        if math.isfinite(x) and math.isfinite(y):
            runs[-1].append((x, y))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]
