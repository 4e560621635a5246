"""Boxes: axis-parallel pieces of a tensor's global shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import product
from typing import NamedTuple


class Box(NamedTuple):
    """A piece of a shape: it starts at ``start`` and extends ``size`` along each dimension, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements; 1 for a 0-d tensor."""
        return math.prod(self.size)

    def inside(self, shape: Sequence[int]) -> bool:
        """Return whether the box is within ``shape``."""
        return len(self.start) == len(self.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= extent
            for start, size, extent in zip(self.start, self.size, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Return whether the boxes share an element."""
        if not self.elements or not other.elements:
            return False
        return all(
            a < b + n and b < a + m for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """Return the box of the whole ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """Return None if ``boxes`` cover ``shape`` exactly once, else the reason why not.

    The boxes' corners determine how often each element is covered. Each corner counts +1 or −1, by the parity of its coordinates that are
    ends. Boxes tile a shape exactly if their corners cancel to those of the shape. Cost: linear in the boxes, times two for each dimension
    that is cut; with many cut dimensions, quadratic in the boxes instead.
    """
    for box in boxes:
        if not box.inside(shape):
            return f"the piece {box} is outside the shape {tuple(shape)}"
    total, covered = math.prod(shape), sum(box.elements for box in boxes)
    if total != covered:
        return f"the pieces hold {covered} elements of {total}"
    solid = [box for box in boxes if box.elements]
    if len(solid) < 2:
        return None
    cut = [dim for dim, extent in enumerate(shape) if any(box.size[dim] != extent for box in solid)]
    if 2 ** len(cut) <= max(len(solid), 16):
        return _cancel(shape, solid, cut)
    for index, box in enumerate(solid):
        for other in solid[:index]:
            if box.overlaps(other):
                return f"the pieces {other} and {box} overlap"
    return None


def _cancel(shape: Sequence[int], boxes: Sequence[Box], cut: Sequence[int]) -> str | None:
    signs = [1 - sum(bits) % 2 * 2 for bits in product((0, 1), repeat=len(cut))]
    corners: dict[tuple[int, ...], int] = {}
    for box, times in [(whole(shape), -1), *((box, 1) for box in boxes)]:
        ends = [(box.start[dim], box.start[dim] + box.size[dim]) for dim in cut]
        for corner, sign in zip(product(*ends), signs, strict=True):
            corners[corner] = corners.get(corner, 0) + sign * times
    where = next((corner for corner, count in corners.items() if count), None)
    return f"the pieces overlap near {where} in dimensions {tuple(cut)}" if where is not None else None
