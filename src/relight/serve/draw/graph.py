"""Graph of runs and their branches: one line for each run, curves where a branch began."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.svg import element, fitting, link, picture, text
from relight.units import compact_text

WIDTH = 960
_LEFT, _RIGHT, _ROW = 190, 30, 40
_ROWS_MAX, _DOTS_MAX, _DOTS_MAX_ALL = 60, 200, 1500
"""Maximum rows, dots in a row, and dots in all rows. Five thousand dots take a third of a second."""


@dataclass(frozen=True)
class Fork:
    """A run, and the checkpoint that it began from."""

    name: str
    steps: Sequence[int]
    """Steps of its checkpoints, ascending."""
    tags: Sequence[tuple[int, str]] = ()
    parent: str = ""
    at: int | None = None
    """The parent's step at which it began."""
    href: str = ""


def graph(forks: Sequence[Fork], description: str) -> Markup:
    """Return the graph: steps from left to right, one row for each run, in the given order."""
    shown = forks[:_ROWS_MAX]
    steps = [step for fork in shown for step in (*fork.steps, *([fork.at] if fork.at is not None else []))]
    low, high = min(steps, default=0), max(steps, default=1)
    row_of = {fork.name: index for index, fork in enumerate(shown)}

    def across(step: float) -> float:
        return _LEFT + (WIDTH - _LEFT - _RIGHT) * (step - low) / max(high - low, 1)

    dots_max = min(_DOTS_MAX, _DOTS_MAX_ALL // max(len(shown), 1))
    parts = []
    for index, fork in enumerate(shown):
        y = index * _ROW + 22
        begin, end = (fork.steps[0], fork.steps[-1]) if fork.steps else (fork.at or low, fork.at or low)
        if fork.at is not None and fork.parent in row_of:
            x, above = across(fork.at), row_of[fork.parent] * _ROW + 22
            parts.append(
                element(
                    "path",
                    element("title", f"{fork.name} began at step {fork.at} of {fork.parent}"),
                    d=f"M{x:.1f} {above}C{x + 18:.1f} {above} {x:.1f} {y} {max(across(begin), x + 18):.1f} {y}",
                    klass="fork",
                )
            )
        parts.append(element("line", x1=across(begin), x2=across(end), y1=y, y2=y, klass=f"branch of-{index % 8}"))
        interval = max(1, -(-len(fork.steps) // dots_max))
        dots = list(fork.steps)[::-1][::interval]  # the newest among them
        parts += [
            element(
                "circle",
                element("title", f"{fork.name}, step {step}"),
                cx=across(step),
                cy=y,
                r=3.2,
                klass=f"dot of-{index % 8}",
            )
            for step in dots
        ]
        for step, tag in fork.tags:
            parts.append(
                element(
                    "g",
                    element("title", f"{tag}: step {step}"),
                    element("path", d=f"M{across(step):.1f} {y - 5}l4-9h-8z"),
                    text(
                        across(step) + (-6 if across(step) > WIDTH - 120 else 6),
                        y - 7,
                        fitting(tag, 110),
                        klass="small",
                        anchor="end" if across(step) > WIDTH - 120 else None,
                    ),
                    klass="tag",
                )
            )
        name = text(_LEFT - 16, y + 4, fitting(fork.name, _LEFT - 24), klass="name", anchor="end")
        parts.append(link([element("title", fork.name), name], fork.href) if fork.href else name)
        parts.append(
            text(
                min(across(end) + 8, WIDTH - 2),
                y + 16,
                compact_text(end) if fork.steps else "",
                klass="tick",
                anchor="end",
            )
        )
    return picture(WIDTH, _ROW * max(len(shown), 1) + 10, description, parts, "graph")
