"""Items of one rank's part: pieces of the rank's tensors, in live memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from relight.capture.sharded import ShardingOf, part
from relight.capture.tensors import TensorSource
from relight.layout import Box, Bytes, Item, whole
from relight.layout.rank_tables import Work
from relight.layout.shards import LocalBox, relative, run_of
from relight.layout.sources import Source

_EMPTY = Bytes(b"")


def owned(item: Item, rank: int) -> Item:
    """Return the item marked as this rank's own by its name."""
    return replace(item, name=f"{item.name}@rank{rank}")


def part_items(
    items: Sequence[Item],
    spreads: Mapping[int, ShardingOf],
    pieces: Sequence[Sequence[LocalBox]],
    works: Sequence[Work],
    leads: bool,
) -> list[Item]:
    """Return the part's items. A leading rank has one item for each item of the state, in the order that its tree
    refers to, then further pieces.
    """
    by_entry: dict[int, list[Item]] = {}
    for work in works:
        item, spread = items[work.entry], spreads.get(work.entry)
        source = source_of(item, spread, pieces[work.entry], work)
        box = None if work.box == whole(item.shape) else work.box
        by_entry.setdefault(work.entry, []).append(
            Item(item.name, item.dtype, item.shape, item.role, source, box, item.trainable)
        )
    if not leads:
        return [piece for index in sorted(by_entry) for piece in by_entry[index]]
    first = [by_entry[index][0] if index in by_entry else _placeholder(item) for index, item in enumerate(items)]
    return [*first, *(piece for index in sorted(by_entry) for piece in by_entry[index][1:])]


def source_of(item: Item, spread: ShardingOf | None, pieces: Sequence[LocalBox], work: Work) -> Source:
    """Return a source for the bytes of ``work.box``, from this rank's ``pieces`` of an item."""
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
    tensor = part(local if spread is None else spread.held(piece), inner)
    return item.source if tensor is local else TensorSource(tensor.detach())


def _tensor_of(item: Item) -> Any:
    return item.source.tensor if isinstance(item.source, TensorSource) else None


def _placeholder(item: Item) -> Item:
    return Item(
        item.name, item.dtype, item.shape, item.role, _EMPTY, Box((0,) * len(item.shape), (0,) * len(item.shape)), False
    )
