"""``writer="rank 0"``: rank 0 gathers all state, and only rank 0 accesses the store.

See also ``rank_0`` (saves), ``gather`` (rank 0 requests boxes), ``restore.from_rank_0`` and
``reader.one_writer`` (the checkpoint that results, and reading it).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple, TypeVar

import msgspec

from relight.capture import Captured, capture
from relight.comm import Communicator, RankTimeout
from relight.decode import from_msgpack
from relight.format import decode_tree, dtype_named, encode_tree
from relight.format.root_keys import RANKS
from relight.layout import Bytes, Item, whole
from relight.layout.routes import Gathering, Route, gatherings
from relight.ranks.collective_errors import raise_failures
from relight.ranks.gather import GatheredSource, HeldPieces, Rank0Exchange
from relight.ranks.part_items import owned
from relight.ranks.remote_errors import encode_failure, is_failure
from relight.ranks.several import Agreement, SeveralRanks, TablePlan
from relight.reader.merged_parts import merge, renumber_leaves
from relight.reader.one_writer import OWN

Given = TypeVar("Given")


class _Meta(NamedTuple):
    """Description of one tensor of a rank's own state."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    role: str
    trainable: bool


class _Word(msgspec.Struct, frozen=True, array_like=True):
    """A rank's description of its state for rank 0: everything but the tensors' bytes. ``common`` is empty if rank 0
    has the same."""

    own: bytes
    own_items: list[_Meta]
    common: bytes = b""
    trainable: list[bool] = []


class OneWriter(SeveralRanks):
    """One rank of a job in which rank 0 writes for all. Every rank must make the same calls."""

    def __init__(self, world: Communicator, per_rank: Sequence[str], timeout_s: float) -> None:
        super().__init__(world, per_rank, timeout_s)
        self.desk = Rank0Exchange(world)
        self._offers: HeldPieces | None = None
        self._routes: tuple[TablePlan, list[Gathering]] | None = None

    @property
    def leads(self) -> bool:
        """Whether this rank writes."""
        return self.world.rank == 0

    @property
    def root_user_fields(self) -> dict[str, Any]:
        """Fields for the root's ``user``, with the number of ranks."""
        return {**super().root_user_fields, **RANKS.field(self.world.size)}

    def serve(self) -> bytes:
        """Send the bytes of the last capture that rank 0 requests. Return its outcome. Raise ``RankTimeout`` if rank 0
        is silent."""
        offers = self._offers
        assert offers is not None
        self.owes_part = False
        return self.run_exchange(lambda: self.desk.answer_requests(offers))

    def refuse(self, error: Exception) -> bytes:
        """Answer rank 0's requests with ``error``, because this rank cannot serve the last capture. Return rank 0's
        outcome."""
        return self.run_exchange(lambda: self.desk.answer_requests(error))

    def run_exchange(self, action: Callable[[], Given]) -> Given:
        """Return the result of ``action``. If a rank does not answer, mark the ranks as lost: this job then exchanges
        nothing more."""
        try:
            return action()
        except RankTimeout:
            self.mark_lost()
            raise

    def mark_lost(self) -> None:
        """Record that a rank did not answer: this job exchanges nothing more."""
        self._lost = True

    def end(self, outcome: bytes) -> None:
        """End the gathering on rank 0: the other ranks continue with ``outcome``."""
        self.owes_part = False
        self._lost = self._lost or self.desk.lost
        if not self._lost:
            self.run_exchange(lambda: self.desk.end(outcome))

    def interrupt(self, why: bytes) -> None:
        """Send ``why`` to the other ranks, which must call ``serve`` once more."""
        self.run_exchange(lambda: self.desk.end(why, over=False))

    # -- inside

    def _part(self, agreement: Agreement) -> Captured:
        self.seat = None
        if self.leads:
            return self.run_exchange(lambda: self._all(agreement))
        common, mine, plan, *_ = agreement
        try:
            if agreement.error is not None:
                raise agreement.error
            self._note_replicas(agreement)
            own = capture(mine)
            self._offers = HeldPieces([*common.items, *own.items], common.spreads, plan.pieces)
            metas = [_Meta(item.name, item.dtype, tuple(item.shape), item.role, item.trainable) for item in own.items]
            word = _Word(encode_tree(own.tree), metas)
            if plan.leads and plan.digests[self.world.rank] != plan.digests[0]:
                word = _Word(word.own, metas, encode_tree(common.tree), [item.trainable for item in common.items])
            message = msgspec.msgpack.encode(word)
        except Exception as error:  # any error, also of the user's code: rank 0 waits for this rank's description
            failure = encode_failure(error)
            self.run_exchange(lambda: self.desk.send_message(failure, [0]))
            raise
        self.run_exchange(lambda: self.desk.send_message(message, [0]))
        self.owes_part = True
        return Captured({}, [], {**common.kinds, **own.kinds}, [*common.notes, *own.notes])

    def _all(self, agreement: Agreement) -> Captured:
        """Return the whole state as one process would capture it. Other ranks' bytes are gathered when they are
        read."""
        words = [b"", *(self.desk.receive_message(rank) for rank in range(1, self.world.size))]
        self.owes_part = True  # the other ranks wait for requests, except those that have failed
        self.desk.absent = {rank for rank, word in enumerate(words) if is_failure(word)}
        if agreement.error is not None:
            raise agreement.error
        self._note_replicas(agreement)
        raise_failures(words)
        common, mine, plan, *_ = agreement
        if self._routes is None or self._routes[0] is not plan:
            self._routes = plan, gatherings(plan.roster)
        gathered = self._routes[1]
        messages = {rank: from_msgpack(word, _Word) for rank, word in enumerate(words) if rank}
        tree, trainable = _common_tree(common, plan, gathered, messages)
        items = [self._item(common, index, gathering, trainable) for index, gathering in enumerate(gathered)]
        own = capture(mine, preceding=items)
        items = own.items
        others = []
        for rank, message in messages.items():
            entries = len(plan.roster.tables[plan.roster.table_of[rank]].entries)
            node = decode_tree(message.own, len(message.own_items), f"rank {rank}'s own state")
            others.append(renumber_leaves(node, list(range(len(items), len(items) + len(message.own_items)))))
            items = [
                *items,
                *(self._own_item(rank, entries + number, meta) for number, meta in enumerate(message.own_items)),
            ]
        offers = HeldPieces([*common.items, *own.items[len(gathered) :]], common.spreads, plan.pieces)
        self.desk.begin(offers, (item.source for item in items if isinstance(item.source, GatheredSource)))
        return Captured(
            {**tree, **own.tree, OWN: others},
            items,
            {**common.kinds, **own.kinds},
            [*common.notes, *own.notes],
            [*common.found, *own.found],
            [*common.missed, *own.missed],
            [*common.plain, *own.plain],
        )

    def _item(self, common: Captured, index: int, one: Gathering, trainable: Mapping[str, bool]) -> Item:
        """Return a whole tensor of the common state: rank 0's own item if rank 0 has all of it."""
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
        source = (
            GatheredSource(self.desk, meta.shape, weight, [Route(rank, entry, 0, box)])
            if prod(meta.shape)
            else Bytes(b"")
        )
        return owned(Item(meta.name, meta.dtype, meta.shape, meta.role, source, None, meta.trainable), rank)


def _common_tree(
    common: Captured, plan: TablePlan, gathered: Sequence[Gathering], messages: Mapping[int, _Word]
) -> tuple[dict[str, Any], dict[str, bool]]:
    """Return rank 0's tree merged with the trees of ranks that have other tensors, and which of those tensors are
    trained."""
    others = {rank: message for rank, message in messages.items() if message.common}
    if not others:
        return common.tree, {}
    numbers = {gathering.entry.name: number for number, gathering in enumerate(gathered)}
    trainable: dict[str, bool] = {}
    tree = decode_tree(encode_tree(common.tree), len(common.items), "the state")
    for rank, message in others.items():
        entries = plan.roster.tables[plan.roster.table_of[rank]].entries
        trainable.update({entry.name: trains for entry, trains in zip(entries, message.trainable, strict=True)})
        theirs = decode_tree(message.common, len(entries), f"rank {rank}'s state")
        merge(tree, renumber_leaves(theirs, [numbers[entry.name] for entry in entries]))
    return tree, trainable
