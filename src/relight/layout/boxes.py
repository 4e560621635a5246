"""Boxes: axis-parallel pieces of a tensor's global shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple


class Box(NamedTuple):
    """A piece of a shape: it starts at ``start`` and extends ``size`` along each dimension, in elements."""

    start: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many elements it holds; 1 for a 0-d tensor."""
        return math.prod(self.size)

    def inside(self, shape: Sequence[int]) -> bool:
        """Whether it lies within ``shape``."""
        return len(self.start) == len(self.size) == len(shape) and all(
            start >= 0 and size >= 0 and start + size <= extent
            for start, size, extent in zip(self.start, self.size, shape, strict=True)
        )

    def overlaps(self, other: Box) -> bool:
        """Whether the two share an element."""
        if not self.elements or not other.elements:
            return False
        return all(
            a < b + n and b < a + m for a, m, b, n in zip(self.start, self.size, other.start, other.size, strict=True)
        )


def whole(shape: Sequence[int]) -> Box:
    """The box that is all of ``shape``."""
    return Box((0,) * len(shape), tuple(shape))


def check_tiling(shape: Sequence[int], boxes: Sequence[Box]) -> str | None:
    """None if ``boxes`` cover ``shape`` exactly once, else what is wrong.

    Equal volume and pairwise disjointness inside the shape imply an exact tiling. Disjointness is checked along a sweep over the
    first dimension, so regular tilings cost O(n log n).
    """
    for box in boxes:
        if not box.inside(shape):
            return f"the piece {box} lies outside the shape {tuple(shape)}"
    total, held = math.prod(shape), sum(box.elements for box in boxes)
    if total != held:
        return f"the pieces hold {held} elements of {total}"
    if not shape or not total or len(boxes) < 2:
        return None
    active: list[Box] = []
    for box in sorted((b for b in boxes if b.elements), key=lambda b: b.start):
        active = [other for other in active if other.start[0] + other.size[0] > box.start[0]]
        for other in active:
            if box.overlaps(other):
                return f"the pieces {other} and {box} overlap"
        active.append(box)
    return None
