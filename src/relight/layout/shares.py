"""Assign writes to ranks: a piece that several ranks hold is written once, and the work is balanced. Pure, and equal on every rank.

For each set of ranks that hold the same pieces, the pieces are concatenated in an order that all these ranks know. The result is cut into
one share of equal bytes for each rank. Cuts are moved to the nearest row, so that few pieces are split.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from relight.layout.boxes import Box
from relight.layout.shards import boxes_of_run, placed

ROW_BYTES_MAX = 1 << 20
"""Rows longer than this are cut at the end of the share, not at a row."""


class SharedBox(NamedTuple):
    """A box that ``ranks`` (ascending) all hold. ``weight`` is the bytes of one element."""

    box: Box
    weight: int
    ranks: tuple[int, ...]


class AssignedBox(NamedTuple):
    """A box of piece ``number`` that the rank must write."""

    number: int
    box: Box


def assign_boxes(pieces: Sequence[SharedBox], rank: int) -> list[AssignedBox]:
    """Return the boxes that ``rank`` writes. ``pieces``: the pieces that it holds, in an order that is the same on all ranks with them.

    Empty boxes are not written. The lowest rank writes 0-d tensors. For each set of ranks, shares differ by at most a row.
    """
    shares: list[AssignedBox] = []
    lines: dict[tuple[int, ...], list[int]] = {}
    for number, piece in enumerate(pieces):
        if len(piece.ranks) == 1 or not piece.box.size:
            if piece.ranks[0] == rank and piece.box.elements:
                shares.append(AssignedBox(number, piece.box))
        elif piece.box.elements:
            lines.setdefault(piece.ranks, []).append(number)
    for ranks, line in lines.items():
        shares += _of_line(pieces, line, ranks.index(rank), len(ranks))
    return sorted(shares)


def _of_line(pieces: Sequence[SharedBox], line: Iterable[int], turn: int, count: int) -> list[AssignedBox]:
    lengths = [(number, pieces[number].box.elements * pieces[number].weight) for number in line]
    total = sum(length for _, length in lengths)
    begin, end = total * turn // count, total * (turn + 1) // count
    shares: list[AssignedBox] = []
    offset = 0
    for number, length in lengths:
        piece = pieces[number]
        first, last = _cut(piece, begin - offset), _cut(piece, end - offset)
        offset += length
        if first == 0 and last == piece.box.elements:
            shares.append(AssignedBox(number, piece.box))
        else:
            shares += [AssignedBox(number, placed(box, piece.box)) for box in boxes_of_run(piece.box.size, first, last)]
    return shares


def _cut(piece: SharedBox, byte: int) -> int:
    """Return the element of the piece at which to cut, near ``byte``."""
    elements = piece.box.elements
    if byte <= 0 or byte >= elements * piece.weight:
        return 0 if byte <= 0 else elements
    size = piece.box.size
    row = math.prod(size[1:]) if len(size) > 1 else 1
    if row * piece.weight > ROW_BYTES_MAX:
        row = 1
    return min(elements, (byte // piece.weight + row // 2) // row * row)
