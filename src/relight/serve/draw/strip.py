"""Strips of cells that show how much each tensor differs between two checkpoints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.svg import element, fitting, picture, text

WIDTH = 960
_LEFT, _ROW, _CELL = 230, 22, 14
_ROWS_MAX, _CELLS_MAX = 60, 51


@dataclass(frozen=True)
class StripItem:
    """A cell of a row."""

    row: str
    name: str
    share: float
    """Fraction that differs, 0 to 1."""
    tooltip: str
    kind: str = "changed"
    """``same``, ``changed``, ``added`` or ``removed``."""


def strip(pieces: Sequence[StripItem], description: str) -> Markup:
    """Return a picture with a row for each ``row``, in the given order, and a cell for each item.

    A cell's shape shows the kind of difference, its shade how much differs.
    """
    rows: dict[str, list[StripItem]] = {}
    for piece in pieces:
        rows.setdefault(piece.row, []).append(piece)
    shown = list(rows.items())[:_ROWS_MAX]
    more = len(rows) - len(shown)
    parts = []
    for index, (name, items) in enumerate(shown):
        y = index * _ROW
        parts.append(text(_LEFT - 10, y + 15, fitting(name, _LEFT - 16), klass="tick", anchor="end"))
        parts += [_cell(piece, _LEFT + column * _CELL, y) for column, piece in enumerate(items[:_CELLS_MAX])]
        if len(items) > _CELLS_MAX:
            parts.append(text(WIDTH - 4, y + 15, "…", klass="tick", anchor="end"))
    height = _ROW * (len(shown) + (more > 0)) or _ROW
    if more > 0:
        parts.append(text(_LEFT, height - 7, f"and {more} rows more, in the table", klass="tick"))
    return picture(WIDTH, height, description, parts, "strip")


def _cell(piece: StripItem, x: float, y: float) -> Markup:
    depth = min(4, 1 + int(max(0.0, min(piece.share, 1.0)) * 3.999)) if piece.kind == "changed" else 0
    middle = y + 11
    shape = {
        "same": element("rect", x=x + 4, y=middle - 1, width=5, height=2, klass="cell same"),
        "added": element("path", d=f"M{x + 6.5} {middle - 5}v10M{x + 1.5} {middle}h10", klass="cell added"),
        "removed": element("path", d=f"M{x + 2} {middle - 4}l9 9m0-9l-9 9", klass="cell removed"),
    }.get(piece.kind) or element(
        "rect", x=x + 1, y=middle - 6, width=11, height=12, klass=f"cell changed depth-{depth}"
    )
    return element("g", element("title", f"{piece.name}: {piece.tooltip}"), shape)
