"""Histograms."""

from __future__ import annotations

from collections.abc import Sequence

from markupsafe import Markup

from relight.serve.draw.svg import element, picture, text
from relight.units import compact_text

WIDTH, HEIGHT = 480, 140


def histogram(edges: Sequence[float], counts: Sequence[int], description: str) -> Markup:
    """Return a histogram. ``len(edges) == len(counts) + 1``. Heights are relative to the largest count."""
    top = max(counts, default=0)
    width = WIDTH / max(len(counts), 1)
    parts = [
        element(
            "g",
            element("title", f"{compact_text(edges[index])} to {compact_text(edges[index + 1])}: {count}"),
            element(
                "rect",
                x=index * width,
                y=HEIGHT - 22 - (HEIGHT - 30) * count / top,
                width=max(width - 1, 0.5),
                height=(HEIGHT - 30) * count / top,
                klass="class",
            ),
        )
        for index, count in enumerate(counts)
        if top and count
    ]
    if edges:
        parts.append(text(0, HEIGHT - 6, compact_text(edges[0]), klass="tick"))
        parts.append(text(WIDTH, HEIGHT - 6, compact_text(edges[-1]), klass="tick", anchor="end"))
    return picture(WIDTH, HEIGHT, description, parts, "histogram")
