"""The items of one rank's part: pieces of what it holds, as live memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from relight.capture.sharded import ShardingOf, part
from relight.capture.tensors import TensorSource
from relight.layout import Box, Bytes, Item, whole
from relight.layout.rank_tables import Work
from relight.layout.shards import LocalBox, relative, run_of
from relight.layout.sources import Source

_EMPTY = Bytes(b"")


def owned(item: Item, rank: int) -> Item:
    """One that is this rank's own: its name says whose."""
    return replace(item, name=f"{item.name}@rank{rank}")


def part_items(
    items: Sequence[Item],
    spreads: Mapping[int, ShardingOf],
    pieces: Sequence[Sequence[LocalBox]],
    works: Sequence[Work],
    leads: bool,
) -> list[Item]:
    """The part's items. Of one that leads: an item for each of the state's, in their order, as its tree points at them; then more
    pieces.
    """
    by_entry: dict[int, list[Item]] = {}
    for work in works:
        item, spread = items[work.entry], spreads.get(work.entry)
        source = source_of(item, spread, pieces[work.entry], work)
        box = None if work.box == whole(item.shape) else work.box
        by_entry.setdefault(work.entry, []).append(Item(item.name, item.dtype, item.shape, item.role, source, box, item.trainable))
    if not leads:
        return [one for index in sorted(by_entry) for one in by_entry[index]]
    first = [by_entry[index][0] if index in by_entry else _placeholder(item) for index, item in enumerate(items)]
    return [*first, *(one for index in sorted(by_entry) for one in by_entry[index][1:])]


def source_of(item: Item, spread: ShardingOf | None, pieces: Sequence[LocalBox], work: Work) -> Source:
    """The bytes of ``work.box``, of what this rank holds of an item in ``pieces``."""
    if not item.shape:
        return item.source
    piece = pieces[work.piece]
    inner = relative(work.box, piece.box)
    local = spread.local if spread is not None else _tensor_of(item)
    if local is None:  # an array's bytes
        view = item.source.view()
        assert view is not None
        first, last = run_of(inner, item.shape)
        weight = item.source.length // whole(item.shape).elements
        return Bytes(view[first * weight : last * weight])
    held = part(local if spread is None else spread.held(piece), inner)
    return item.source if held is local else TensorSource(held.detach())


def _tensor_of(item: Item) -> Any:
    return item.source.tensor if isinstance(item.source, TensorSource) else None


def _placeholder(item: Item) -> Item:
    return Item(item.name, item.dtype, item.shape, item.role, _EMPTY, Box((0,) * len(item.shape), (0,) * len(item.shape)), False)
