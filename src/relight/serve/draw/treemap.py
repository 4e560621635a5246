"""Squarified treemaps, after Bruls, Huizing and van Wijk (2000)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from markupsafe import Markup

from relight.serve.draw.svg import element, fitting, link, picture, text

WIDTH, HEIGHT = 960, 420
_TILES_MAX = 400
_CUT_LEAST = 12


@dataclass(frozen=True)
class Tile:
    """A tile of the treemap."""

    name: str
    size: float
    tooltip: str
    """Its size and other facts, as text."""
    href: str = ""
    short: str = ""
    """Label on the tile where it fits; empty for the name."""
    group: int = 0
    """Tiles of one group have the same colour. There are eight colours."""


@dataclass(frozen=True)
class TileBox:
    """Position and size of a tile."""

    x: float
    y: float
    width: float
    height: float


def treemap(tiles: Sequence[Tile], description: str) -> Markup:
    """Return the treemap, largest tiles first. Tiles beyond ``_TILES_MAX`` are merged into one."""
    shown = sorted((tile for tile in tiles if tile.size > 0), key=lambda tile: (-tile.size, tile.name))
    if len(shown) > _TILES_MAX:
        merged_tiles = shown[_TILES_MAX - 1 :]
        shown = [
            *shown[: _TILES_MAX - 1],
            Tile(f"{len(merged_tiles)} more", sum(tile.size for tile in merged_tiles), "the smallest", group=7),
        ]
        shown.sort(key=lambda tile: -tile.size)
    boxes = squarify([tile.size for tile in shown], TileBox(0, 0, WIDTH, HEIGHT))
    return picture(WIDTH, HEIGHT, description, [_tile(tile, box) for tile, box in zip(shown, boxes)], "treemap")


def squarify(sizes: Sequence[float], inside: TileBox) -> list[TileBox]:
    """Return a box for each size, with an area in proportion to it. ``sizes``: positive, in descending order."""
    total = sum(sizes)
    if not sizes or total <= 0 or inside.width <= 0 or inside.height <= 0:
        return []
    scale = inside.width * inside.height / total
    areas, boxes, begin = [size * scale for size in sizes], [], 0
    while begin < len(areas):
        side = min(inside.width, inside.height)
        end = begin + 1
        while end < len(areas) and _worst(areas[begin : end + 1], side) <= _worst(areas[begin:end], side):
            end += 1
        placed, inside = _row(areas[begin:end], inside)
        boxes += placed
        begin = end
    return boxes


def _worst(row: Sequence[float], side: float) -> float:
    """Return the worst aspect ratio of the row's boxes, at least 1."""
    whole = sum(row)
    return max(side * side * row[0] / (whole * whole), whole * whole / (side * side * row[-1])) if side > 0 else 0.0


def _row(row: Sequence[float], inside: TileBox) -> tuple[list[TileBox], TileBox]:
    """Place a row along the shorter side. Return its boxes and the remaining area."""
    whole, boxes = sum(row), []
    if inside.width >= inside.height:
        thick, y = min(whole / inside.height, inside.width) if inside.height > 0 else 0.0, inside.y
        for area in row:
            tall = area / thick if thick else 0.0
            boxes.append(TileBox(inside.x, y, thick, tall))
            y += tall
        return boxes, TileBox(inside.x + thick, inside.y, max(inside.width - thick, 0.0), inside.height)
    thick, x = min(whole / inside.width, inside.height) if inside.width > 0 else 0.0, inside.x
    for area in row:
        wide = area / thick if thick else 0.0
        boxes.append(TileBox(x, inside.y, wide, thick))
        x += wide
    return boxes, TileBox(inside.x, inside.y + thick, inside.width, max(inside.height - thick, 0.0))


def _tile(tile: Tile, box: TileBox) -> Markup:
    inside = [
        element("title", f"{tile.name}: {tile.tooltip}"),
        element(
            "rect",
            x=box.x,
            y=box.y,
            width=max(box.width - 1, 0.5),
            height=max(box.height - 1, 0.5),
            klass=f"tile of-{tile.group % 8}",
        ),
    ]
    name = fitting(tile.short or tile.name, box.width - 24)
    if box.height > 17 and name and ("…" not in name or len(name) >= _CUT_LEAST):
        inside.append(text(box.x + 6, box.y + 15, name, klass="name"))
        if box.height > 33 and len(tile.tooltip) * 6.2 < box.width - 10:
            inside.append(text(box.x + 6, box.y + 30, tile.tooltip, klass="small"))
    if tile.href:
        return link(inside, tile.href)
    return element("g", *inside)
