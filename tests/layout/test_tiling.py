"""Whether boxes tile a shape is decided at a cost that no file can increase."""

from __future__ import annotations

import itertools
import math
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from relight.layout import Box, check_tiling


def grid(*counts: int, size: int = 2) -> tuple[tuple[int, ...], list[Box]]:
    """Return a shape and the equal boxes that it is cut into, ``counts`` along each dimension."""
    starts = itertools.product(*(range(0, count * size, size) for count in counts))
    return tuple(count * size for count in counts), [Box(start, (size,) * len(counts)) for start in starts]


def covers_once(shape: tuple[int, ...], boxes: list[Box]) -> bool:
    """Element by element."""
    elements = [
        element
        for box in boxes
        for element in itertools.product(*(range(a, a + n) for a, n in zip(box.start, box.size, strict=True)))
    ]
    return sorted(elements) == list(itertools.product(*map(range, shape)))


@pytest.mark.parametrize("counts", [(1,), (7,), (1, 9), (9, 1), (5, 6), (3, 1, 4), (2, 2, 2, 2, 2, 2, 2)])
def test_grids_tile(counts: tuple[int, ...]) -> None:
    """Boxes cut along any dimensions tile in any order. A moved, repeated or missing box is detected."""
    shape, boxes = grid(*counts)
    assert check_tiling(shape, boxes) is None
    assert check_tiling(shape, boxes[::-1]) is None
    if len(boxes) > 1:
        assert check_tiling(shape, boxes[1:]) is not None
        assert "overlap" in str(check_tiling(shape, [boxes[1], *boxes[1:]]))


def test_pieces_that_no_cut_separates() -> None:
    """A pinwheel of five boxes. No box extends across the whole shape."""
    pinwheel = [Box((0, 0), (1, 2)), Box((0, 2), (2, 1)), Box((2, 1), (1, 2)), Box((1, 0), (2, 1)), Box((1, 1), (1, 1))]
    assert check_tiling((3, 3), pinwheel) is None
    assert "overlap" in str(check_tiling((3, 3), [*pinwheel[:-1], Box((0, 0), (1, 1))]))


pieces = st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 4), st.integers(0, 4))


@given(st.tuples(st.integers(0, 4), st.integers(0, 4)), st.lists(pieces, max_size=6))
def test_it_agrees_with_counting_elements(shape: tuple[int, int], cuts: list[tuple[int, int, int, int]]) -> None:
    """Whatever the boxes, empty ones among them."""
    boxes = [Box((a, b), (m, n)) for a, b, m, n in cuts]
    inside = all(box.inside(shape) for box in boxes)
    assert (check_tiling(shape, boxes) is None) == (inside and covers_once(shape, boxes))


@given(st.integers(1, 5), st.integers(1, 5), st.data())
def test_cuts_of_cuts_tile(rows: int, columns: int, data: st.DataObject) -> None:
    """Boxes that are halved repeatedly still tile. A box that extends over its neighbour does not."""
    boxes = [Box((0, 0, 0), (rows, columns, 4))]
    for _ in range(data.draw(st.integers(0, 8))):
        box = boxes.pop(data.draw(st.integers(0, len(boxes) - 1)))
        dim = data.draw(st.integers(0, 2))
        cut = data.draw(st.integers(0, box.size[dim]))
        first, second = list(box.size), list(box.size)
        first[dim], second[dim] = cut, box.size[dim] - cut
        start = list(box.start)
        start[dim] += cut
        boxes += [Box(box.start, tuple(first)), Box(tuple(start), tuple(second))]
    assert check_tiling((rows, columns, 4), boxes) is None
    solid = [box for box in boxes if box.elements]
    if len(solid) > 1 and solid[0].elements == solid[1].elements:
        assert check_tiling((rows, columns, 4), [solid[0], solid[0], *solid[2:]]) is not None


@pytest.mark.parametrize("counts", [(2000, 1), (1, 2000), (45, 45), (1, 2000, 1)])
def test_no_pair_of_pieces_is_compared(counts: tuple[int, ...]) -> None:
    """Cut along the first dimension or any other: the cost is that of the boxes, not of their pairs."""
    shape, boxes = grid(*counts)
    with mock.patch.object(Box, "overlaps", side_effect=AssertionError("a pair was compared")):
        assert check_tiling(shape, boxes) is None
        assert math.prod(shape) == sum(box.elements for box in boxes)
