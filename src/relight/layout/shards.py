"""Shards: which elements of a global tensor a rank holds, as boxes, however it was cut.

A tensor is cut along a mesh of ranks, one dimension of the mesh after the other. Each cut takes, of what is left along one dimension of the
tensor, one of several parts, as ``torch.chunk`` makes them: all of one length, the last ones shorter or empty. A *strided* cut first makes
``split`` chunks and takes its part of each of them, which is what is left when the cuts were made in the other order (FSDP over tensor
parallelism). A tensor that was flattened before it was cut (flat parameters, ZeRO) is held as a run of its elements instead.
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
    """A box of the global shape, and where it begins in the rank's own tensor."""

    box: Box
    at: tuple[int, ...]


def local_shape(shape: Sequence[int], cuts: Sequence[Cut]) -> tuple[int, ...]:
    """The shape of what is left of ``shape`` behind all cuts."""
    return tuple(sum(size for _, size in runs) for runs in _runs(shape, cuts))


def local_pieces(shape: Sequence[int], cuts: Sequence[Cut]) -> list[LocalBox]:
    """What is left of ``shape`` behind all cuts, as boxes. None if nothing is; one unless a cut was strided."""
    runs = _runs(shape, cuts)
    if not all(runs):
        return []
    places = [[0, *accumulate(size for _, size in held)] for held in runs]
    return [
        LocalBox(
            Box(tuple(run[0] for run in chosen), tuple(run[1] for run in chosen)),
            tuple(place[number] for place, number in zip(places, numbers, strict=True)),
        )
        for numbers in product(*(range(len(held)) for held in runs))
        for chosen in [[held[number] for held, number in zip(runs, numbers, strict=True)]]
    ]


def _runs(shape: Sequence[int], cuts: Sequence[Cut]) -> list[list[tuple[int, int]]]:
    """For each dimension the runs ``(start, size)`` of global indices that are left, in the order in which they lie."""
    runs = [[(0, extent)] if extent else [] for extent in shape]
    for cut in cuts:
        held = runs[cut.dim]
        length = sum(size for _, size in held)
        step = _step(length, cut.split)
        taken: list[tuple[int, int]] = []
        for first in range(0, length, step) if step else ():
            inner = min(step, length - first)
            part = _step(inner, cut.parts)
            begin = min(part * cut.turn, inner)
            taken += _between(held, first + begin, first + min(begin + part, inner))
        runs[cut.dim] = _joined(taken)
    return runs


def _step(length: int, parts: int) -> int:
    return -(-length // parts)


def _between(runs: Sequence[tuple[int, int]], begin: int, end: int) -> Iterator[tuple[int, int]]:
    """Of consecutive runs, those at local indices ``begin`` to ``end``."""
    at = 0
    for start, size in runs:
        first, last = max(begin, at), min(end, at + size)
        if first < last:
            yield start + first - at, last - first
        at += size


def _joined(runs: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, size in runs:
        if joined and sum(joined[-1]) == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + size)
        else:
            joined.append((start, size))
    return joined


def boxes_of_run(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """Elements ``start`` to ``end`` of ``shape``, row by row, as boxes in that order: at most two for each dimension but the last, and
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


def intersection(one: Box, other: Box) -> Box | None:
    """What two boxes share; None if that is nothing."""
    start = tuple(map(max, one.start, other.start))
    size = tuple(min(a + n, b + m) - at for a, n, b, m, at in zip(one.start, one.size, other.start, other.size, start, strict=True))
    return Box(start, size) if all(extent > 0 for extent in size) else None


def relative(box: Box, to: Box) -> Box:
    """``box`` as it lies within ``to``."""
    return Box(tuple(a - b for a, b in zip(box.start, to.start, strict=True)), box.size)


def placed(box: Box, within: Box) -> Box:
    """Where ``box``, as it lies within another, lies with that one: what ``relative`` undoes."""
    return Box(tuple(a + b for a, b in zip(box.start, within.start, strict=True)), box.size)


def run_of(box: Box, within: Sequence[int]) -> tuple[int, int]:
    """The first and one past the last element of ``box`` in a row-major array of shape ``within``: all its elements lie between."""
    strides = _strides(within)
    first = sum(start * stride for start, stride in zip(box.start, strides, strict=True))
    last = sum((start + size - 1) * stride for start, size, stride in zip(box.start, box.size, strides, strict=True))
    return (first, last + 1) if box.elements else (first, first)


def _strides(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]
