"""Shards: the boxes of a global tensor that a rank holds, for every kind of sharding.

A tensor is cut along a mesh of ranks, one mesh dimension after the other. Each cut splits the remaining extent of one tensor dimension into
parts as ``torch.chunk`` does (equal lengths, the last ones shorter or empty), and keeps one part. A *strided* cut first splits into
``split`` chunks and keeps its part of each chunk. That is the result of cuts in the other order (FSDP over tensor parallelism). A tensor
that was flattened before it was cut (flat parameters, ZeRO) is held as a run of its elements instead.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import accumulate, product
from typing import NamedTuple

from relight.layout.boxes import Box


class Cut(NamedTuple):
    """Part ``turn`` of ``parts`` along tensor dimension ``dim``; of each of ``split`` chunks if that is more than one."""

    dim: int
    parts: int
    turn: int
    split: int = 1


class LocalBox(NamedTuple):
    """A box of the global shape, and its start in the rank's local tensor."""

    box: Box
    at: tuple[int, ...]


def local_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """Return the local shape after all cuts."""
    return tuple(sum(size for _, size in runs) for runs in _runs(shape, cuts))


def local_pieces(shape: Sequence[int], cuts: Sequence[Cut]) -> list[LocalBox]:
    """Return the boxes that remain after all cuts: an empty list if nothing remains; one box unless a cut is strided."""
    runs = _runs(shape, cuts)
    if not all(runs):
        return []
    places = [[0, *accumulate(size for _, size in dim_runs)] for dim_runs in runs]
    return [
        LocalBox(
            Box(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)),
            tuple(place[number] for place, number in zip(places, numbers, strict=True)),
        )
        for numbers in product(*(range(len(dim_runs)) for dim_runs in runs))
        for chosen in [[dim_runs[number] for dim_runs, number in zip(runs, numbers, strict=True)]]
    ]


def _runs(shape: Sequence[int], cuts: Sequence[Cut]) -> list[list[tuple[int, int]]]:
    """Return for each dimension the remaining runs ``(start, size)`` of global indices, in local order."""
    runs = [[(0, extent)] if extent else [] for extent in shape]
    for cut in cuts:
        dim_runs = runs[cut.dim]
        length = sum(size for _, size in dim_runs)
        step = _step(length, cut.split)
        taken: list[tuple[int, int]] = []
        for first in range(0, length, step) if step else ():
            inner = min(step, length - first)
            part = _step(inner, cut.parts)
            begin = min(part * cut.turn, inner)
            taken += _between(dim_runs, first + begin, first + min(begin + part, inner))
        runs[cut.dim] = _joined(taken)
    return runs


def _step(length: int, parts: int) -> int:
    return -(-length // parts)


def _between(runs: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the parts of consecutive runs at local indices ``begin`` to ``end``."""
    offset = 0
    for start, size in runs:
        first, last = max(begin, offset), min(end, offset + size)
        if first < last:
            yield start + first - offset, last - first
        offset += size


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def boxes_of_run(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Return elements ``start`` to ``end`` of ``shape``, in row-major order, as boxes: at most two for each dimension except the last, plus
    one.
    """
    if start >= end:
        return []
    if not shape:
        return [Box((), ())]
    row = math.prod(shape[1:])
    first, last = start // row, (end - 1) // row
    if first == last and end - start < row:
        return [_deeper(first, box) for box in boxes_of_run(shape[1:], start - first * row, end - first * row)]
    boxes: list[Box] = []
    if start % row:
        boxes += [_deeper(first, box) for box in boxes_of_run(shape[1:], start % row, row)]
        first += 1
    whole = end // row
    if whole > first:
        boxes.append(Box((first, *(0 for _ in shape[1:])), (whole - first, *shape[1:])))
    if end % row:
        boxes += [_deeper(whole, box) for box in boxes_of_run(shape[1:], 0, end % row)]
    return boxes


def _deeper(row: int, box: Box) -> Box:
    return Box((row, *box.start), (1, *box.size))


def intersection(box: Box, other: Box) -> Box | None:
    """Return the intersection of two boxes; None if it is empty."""
    start = tuple(map(max, box.start, other.start))
    size = tuple(
        min(a + n, b + m) - begin
        for a, n, b, m, begin in zip(box.start, box.size, other.start, other.size, start, strict=True)
    )
    return Box(start, size) if all(extent > 0 for extent in size) else None


def relative(box: Box, to: Box) -> Box:
    """Return ``box`` relative to the start of ``to``."""
    return Box(tuple(a - b for a, b in zip(box.start, to.start, strict=True)), box.size)


def placed(box: Box, within: Box) -> Box:
    """Return ``box``, which is relative to ``within``, in global coordinates: the inverse of ``relative``."""
    return Box(tuple(a + b for a, b in zip(box.start, within.start, strict=True)), box.size)


def run_of(box: Box, within: Sequence[int]) -> tuple[int, int]:
    """Return the index of the first element of ``box``, and one past the last, in a row-major array of shape ``within``."""
    strides = _strides(within)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    last = sum((start + size - 1) * stride for start, size, stride in zip(box.start, box.size, strides, strict=True))
    return (first, last + 1) if box.elements else (first, first)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
