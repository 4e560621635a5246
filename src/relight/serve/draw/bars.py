"""Stacked bars of shares, and gauges of how much of a limit is used."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.svg import element, fitting, picture, text

WIDTH = 960


@dataclass(frozen=True)
class BarPart:
    """A part of a stacked bar."""

    name: str
    amount: float
    tooltip: str
    kind: str = "other"
    """CSS class that selects its colour, named after the meaning."""


def bar(shares: Sequence[BarPart], description: str) -> Markup:
    """Return a stacked bar. Labels are shown where they fit; tooltips have the full text."""
    total = sum(share.amount for share in shares if share.amount > 0)
    parts, x = [], 0.0
    for share in shares:
        if share.amount <= 0 or total <= 0:
            continue
        width = WIDTH * share.amount / total
        inside = [
            element("title", f"{share.name}: {share.tooltip}"),
            element("rect", x=x, y=0, width=max(width - 1, 0.5), height=34, klass=f"share {share.kind}"),
        ]
        if fitting(share.name, width - 12) == share.name:
            inside.append(text(x + 7, 22, share.name, klass="on"))
        parts.append(element("g", *inside))
        x += width
    return picture(WIDTH, 34, description, parts, "bar")


def usage(used: float, limit: float | None, description: str) -> Markup:
    """Return a gauge. Above the limit it is full and has the class ``over``."""
    share = 0.0 if not limit or limit <= 0 else min(used / limit, 1.0)
    kind = "over" if limit and used > limit else "high" if share > 0.9 else "fine"
    parts = [
        element("rect", x=0, y=0, width=200, height=12, rx=3, klass="frame"),
        element("rect", x=0, y=0, width=200 * share, height=12, rx=3, klass=f"used {kind}"),
    ]
    return picture(200, 12, description, parts, "usage")
