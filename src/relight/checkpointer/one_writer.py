"""Ranks of which one writes and reads: rank 0 gathers what there is, and only it ever touches the store.

The other files of it: ``rank_0`` (the way of a save), ``gather`` (rank 0 asks for boxes), ``resume_from_one`` (restoring), and
``catalog.one_writer`` (the checkpoint that results, and reading it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import msgspec

from relight.capture import Captured, capture
from relight.catalog.merged_parts import merge, renumber_leaves
from relight.catalog.one_writer import OWN, RANKS
from relight.checkpointer.gather import GatheredSource, HeldPieces, Rank0Exchange
from relight.checkpointer.part_items import owned
from relight.checkpointer.ranks import Ranks, TablePlan
from relight.comm import Communicator, RankTimeout
from relight.decode import from_msgpack
from relight.format import decode_tree, dtype_named, encode_tree
from relight.layout import Bytes, Item, whole
from relight.layout.routes import Gathering, Route, gatherings

Given = TypeVar("Given")


class _Meta(NamedTuple):
    """One tensor that a rank has of its own."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    trainable: bool


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """What a rank tells rank 0 of its state: all but the tensors' bytes. ``common`` is empty if rank 0 has it, too."""

    own: bytes
    own_items: list[_Meta]
    common: bytes = b""
    trainable: list[bool] = []


class OneWriter(Ranks):
    """A rank among others, of which rank 0 writes for all. Every rank makes the same calls."""

    def __init__(self, world: Communicator, per_rank: Sequence[str], timeout_s: float) -> None:
        super().__init__(world, per_rank, timeout_s)
        self.desk = Rank0Exchange(world)
        self._offers: HeldPieces | None = None
        self._routes: tuple[TablePlan, list[Gathering]] | None = None

    @property
    def leads(self) -> bool:
        """Whether this one writes."""
        return self.world.rank == 0

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """See ``Ranks``; and how many ranks there are."""
        return {**super().root_user_fields, RANKS: self.world.size}

    def serve(self) -> bytes:
        """Give rank 0 what it asks for of the last capture: what it says at the end. ``LateRanks`` if it says nothing any more."""
        offers = self._offers
        assert offers is not None
        return self.run_exchange(lambda: self.desk.answer_requests(offers))

    def run_exchange(self, action: Callable[[], Given]) -> Given:
        """What ``action`` gives; if somebody did not answer, nothing more is said by this job."""
        try:
            return action()
        except RankTimeout:
            self._lost = True
            raise

    def end(self, outcome: bytes) -> None:
        """Rank 0 has all it needs, or needs no more: the others go on, with ``outcome``."""
        self._lost = self._lost or self.desk.lost
        if not self._lost:
            self.run_exchange(lambda: self.desk.end(outcome))

    def interrupt(self, why: bytes) -> None:
        """The others hear ``why``, and are to ``serve`` once more."""
        self.run_exchange(lambda: self.desk.end(why, over=False))

    # -- inside

    def _part(self, common: Captured, plan: TablePlan, mine: Mapping[str, object]) -> Captured:
        self.seat = None
        if self.leads:
            return self.run_exchange(lambda: self._all(common, plan, mine))
        own = capture(mine)
        self._offers = HeldPieces([*common.items, *own.items], common.spreads, plan.pieces)
        metas = [_Meta(item.name, item.dtype, tuple(item.shape), item.role, item.trainable) for item in own.items]
        word = _Word(encode_tree(own.tree), metas)
        if plan.leads and plan.digests[self.world.rank] != plan.digests[0]:
            word = _Word(word.own, metas, encode_tree(common.tree), [item.trainable for item in common.items])
        self.run_exchange(lambda: self.desk.send_message(msgspec.msgpack.encode(word), [0]))
        return Captured({}, [], {**common.kinds, **own.kinds}, [*common.notes, *own.notes])

    def _all(self, common: Captured, plan: TablePlan, mine: Mapping[str, object]) -> Captured:
        """The whole state, as one process would have it; what others hold of it is gathered when it is read."""
        if self._routes is None or self._routes[0] is not plan:
            self._routes = plan, gatherings(plan.roster)
        found = self._routes[1]
        words = {rank: from_msgpack(self.desk.receive_message(rank), _Word) for rank in range(1, self.world.size)}
        tree, trainable = _common_tree(common, plan, found, words)
        items = [self._item(common, index, one, trainable) for index, one in enumerate(found)]
        own = capture(mine, behind=items)
        items = own.items
        others = []
        for rank, word in words.items():
            entries = len(plan.roster.tables[plan.roster.table_of[rank]].entries)
            node = decode_tree(word.own, len(word.own_items), f"rank {rank}'s own state")
            others.append(renumber_leaves(node, list(range(len(items), len(items) + len(word.own_items)))))
            items = [*items, *(self._own_item(rank, entries + number, meta) for number, meta in enumerate(word.own_items))]
        offers = HeldPieces([*common.items, *own.items[len(found) :]], common.spreads, plan.pieces)
        self.desk.begin(offers, (item.source for item in items if isinstance(item.source, GatheredSource)))
        return Captured(
            {**tree, **own.tree, OWN: others}, items, {**common.kinds, **own.kinds}, [*common.notes, *own.notes],
            [*common.found, *own.found], [*common.missed, *own.missed],
        )  # fmt: skip

    def _item(self, common: Captured, index: int, one: Gathering, trainable: Mapping[str, bool]) -> Item:
        """One of what the ranks have in common, whole: rank 0's own item if it has all of it."""
        entry, routes = one
        here = index < len(common.items)
        if here and all(route.rank == 0 and route.box == whole(entry.shape) for route in routes):
            return common.items[index]
        source = GatheredSource(self.desk, entry.shape, entry.weight, routes) if prod(entry.shape) else Bytes(b"")
        trains = common.items[index].trainable if here else trainable.get(entry.name, False)
        return Item(entry.name, entry.dtype, entry.shape, entry.role, source, None, trains)

    def _own_item(self, rank: int, entry: int, meta: _Meta) -> Item:
        weight = dtype_named(meta.dtype).itemsize
        box = whole(meta.shape)
        source = GatheredSource(self.desk, meta.shape, weight, [Route(rank, entry, 0, box)]) if prod(meta.shape) else Bytes(b"")
        return owned(Item(meta.name, meta.dtype, meta.shape, meta.role, source, None, meta.trainable), rank)


def _common_tree(
    common: Captured, plan: TablePlan, found: Sequence[Gathering], words: Mapping[int, _Word]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Rank 0's tree, with what ranks that hold other tensors have besides; and which of those are trained."""
    told = {rank: word for rank, word in words.items() if word.common}
    if not told:
        return common.tree, {}
    numbers = {one.entry.name: number for number, one in enumerate(found)}
    trainable: dict[str, bool] = {}
    tree = decode_tree(encode_tree(common.tree), len(common.items), "the state")
    for rank, word in told.items():
        entries = plan.roster.tables[plan.roster.table_of[rank]].entries
        trainable.update({entry.name: trains for entry, trains in zip(entries, word.trainable, strict=True)})
        theirs = decode_tree(word.common, len(entries), f"rank {rank}'s state")
        merge(tree, renumber_leaves(theirs, [numbers[entry.name] for entry in entries]))
    return tree, trainable
