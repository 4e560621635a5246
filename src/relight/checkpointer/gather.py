"""Rank 0 gathers what the others hold: it asks for boxes, they give them, a few MiB at a time, straight to where they belong.

Rank 0's state has sources (``Gathered``) that ask when they are read, and so they are read like any others: into a slot of the agent's
memory, or slab by slab into a pack. Meanwhile the other ranks answer (``Desk.serve``) until they are told that it is over.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

import msgspec
import torch

from relight.capture.sharded import ShardingOf, part
from relight.capture.tensors import memory_of
from relight.checkpointer.part_items import source_of
from relight.comm import Communicator, RankTimeout
from relight.layout import Box, Item, Source, whole
from relight.layout.rank_tables import Work
from relight.layout.routes import Route
from relight.layout.shards import LocalBox, boxes_of_run, intersection, relative
from relight.layout.sources import copy_from

PIECE_BYTES = 4 << 20
"""The most that is asked for, and sent, at once."""
AHEAD = 2
"""Questions under way."""
SMALL_BYTES = 64 << 10
"""Tensors up to this are asked for together: a question costs more than their bytes."""
SMALL_HELD_BYTES = 8 << 20
"""The most that is kept of those that were not asked for yet."""
FRAME_BYTES = 1 << 10
"""What comes in one go of a message; the rest, if there is any, in a second."""
_ALIGN = 16
WEIGHTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Elements that every kernel can copy, by bytes."""
_END, _ASK = b".", b"?"


class PieceRequest(NamedTuple):
    """``box`` of the global shape, from piece ``piece`` of a rank's entry ``entry``; ``into`` is where it goes."""

    rank: int
    entry: int
    piece: int
    box: Box
    into: torch.Tensor

    @property
    def length(self) -> int:
        """Bytes of it."""
        return self.into.nbytes


class HeldPieces:
    """What a rank can give: its items, and the pieces of each that it holds."""

    def __init__(self, items: Sequence[Item], spreads: Mapping[int, ShardingOf], pieces: Sequence[Sequence[LocalBox]]) -> None:
        """``pieces`` of the first items; those behind them it has whole."""
        self._items, self._spreads = items, spreads
        self._pieces = [*pieces, *([LocalBox(whole(item.shape), (0,) * len(item.shape))] for item in items[len(pieces) :])]

    def source(self, entry: int, piece: int, box: Box) -> Source:
        """The bytes of that box."""
        return source_of(self._items[entry], self._spreads.get(entry), self._pieces[entry], Work(entry, box, piece))


class GatheredSource:
    """A source for all bytes of a tensor of ``shape`` that is on several ranks. To be read before the gathering is over."""

    def __init__(self, desk: Rank0Exchange, shape: Sequence[int], weight: int, routes: Sequence[Route]) -> None:
        self._desk, self.shape, self.weight, self.routes = desk, tuple(shape), weight, routes
        self.length = prod(self.shape) * weight

    def view(self) -> memoryview | None:
        """They are not here."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Get them. One at a time; ``LateRanks`` if somebody does not answer."""
        self._desk.fill(self, start, into)

    def orders(self, start: int, into: memoryview) -> Iterator[PieceRequest]:
        """What to ask for bytes from ``start`` on: boxes of ``PIECE_BYTES`` at most."""
        flat = torch.frombuffer(into, dtype=WEIGHTS[self.weight])
        begin, end = start // self.weight, start // self.weight + len(flat)
        step = PIECE_BYTES // self.weight
        for first in range(begin, end, step):
            at = first - begin
            for box in boxes_of_run(self.shape, first, min(end, first + step)):
                target = flat[at : at + box.elements].view(box.size)
                at += box.elements
                for route in self.routes:
                    shared = intersection(box, route.box)
                    if shared is not None:
                        yield PieceRequest(route.rank, route.entry, route.piece, shared, part(target, relative(shared, box)))


class Rank0Exchange:
    """One rank's end of the gathering. What rank 0 does is done by one thread at a time."""

    def __init__(self, world: Communicator) -> None:
        self.world = world
        self._lock = threading.Lock()
        self._room: memoryview | None = None
        self._offers: HeldPieces | None = None
        self._small: list[GatheredSource] = []
        self._place: dict[int, int] = {}
        self._held: dict[int, bytearray] = {}
        self._held_bytes = 0
        self.lost = False
        """Whether somebody did not answer: nothing more can be said then."""

    # -- rank 0

    def begin(self, offers: HeldPieces, sources: Iterable[GatheredSource]) -> None:
        """What rank 0 has itself, and what will be read, in the likely order."""
        self._offers, self._held, self._held_bytes = offers, {}, 0
        self._small = [one for one in sources if one.length <= SMALL_BYTES]
        self._place = {id(one): at for at, one in enumerate(self._small)}

    def fill(self, source: GatheredSource, start: int, into: memoryview) -> None:
        """See ``Gathered.fill``."""
        with self._lock:
            if id(source) not in self._place:
                self._pull(source.orders(start, into))
                return
            at = self._place[id(source)]
            if at not in self._held:
                self._pull_small(at)
            held = self._held[at]
            into[:] = held[start : start + len(into)]
            if start + len(into) == len(held):
                del self._held[at]
                self._held_bytes -= len(held)

    def end(self, outcome: bytes, *, over: bool = True) -> None:
        """It is over: ``serve`` gives ``outcome`` to the others. Nothing if they are lost."""
        if over:
            self._offers, self._held, self._small, self._place, self._room = None, {}, [], {}, None
        if not self.lost:
            self.send_message(_END + outcome, [rank for rank in range(self.world.size) if rank != self.world.rank])

    def _pull_small(self, at: int) -> None:
        """That one, and those behind it that will be asked for soon."""
        orders: list[PieceRequest] = []
        taken = 0
        for number in range(at, len(self._small)):
            length = self._small[number].length
            if taken and (taken + length > PIECE_BYTES or self._held_bytes + length > SMALL_HELD_BYTES):
                break
            if number not in self._held:
                self._held[number] = bytearray(length)
                self._held_bytes += length
                taken += length
                orders += self._small[number].orders(0, memoryview(self._held[number]))
        self._pull(orders)

    def _pull(self, orders: Iterable[PieceRequest]) -> None:
        under_way: deque[tuple[int, list[PieceRequest]]] = deque()
        for rank, batch in _batches(orders):
            if rank == self.world.rank:
                self._take_own(batch)
                continue
            if len(under_way) == AHEAD:
                self._take(*under_way.popleft())
            self.send_message(_ASK + msgspec.msgpack.encode([(one.entry, one.piece, one.box) for one in batch]), [rank])
            under_way.append((rank, batch))
        while under_way:
            self._take(*under_way.popleft())

    def _take(self, rank: int, batch: list[PieceRequest]) -> None:
        memory = memory_of(batch[0].into) if len(batch) == 1 else None
        if memory is not None and not len(memory) % _ALIGN:
            self.receive(memory, rank)
            return
        room = self._scratch[: sum(_padded(one.length) for one in batch)]
        self.receive(room, rank)
        at = 0
        for one in batch:
            _put(room[at : at + one.length], one.into)
            at += _padded(one.length)

    def _take_own(self, batch: list[PieceRequest]) -> None:
        assert self._offers is not None
        for one in batch:
            source, memory = self._offers.source(one.entry, one.piece, one.box), memory_of(one.into)
            room = memory if memory is not None else self._scratch[: one.length]
            copy_from(source, 0, room)
            if memory is None:
                _put(room, one.into)

    # -- the others

    def answer_requests(self, offers: HeldPieces) -> bytes:
        """Give what rank 0 asks for, until it is over: what came of it. ``LateRanks`` if rank 0 says nothing any more."""
        try:
            while True:
                word = self.receive_message(0)
                if word[:1] == _END:
                    return word[1:]
                at = 0
                for entry, piece, (start, size) in msgspec.msgpack.decode(word[1:]):
                    source = offers.source(entry, piece, Box(tuple(start), tuple(size)))
                    copy_from(source, 0, self._scratch[at : at + source.length])
                    at += _padded(source.length)
                self.send(self._scratch[:at], (0,))
        finally:
            self._room = None

    # -- words

    def send_message(self, data: bytes, to: Sequence[int]) -> None:
        """A message of any length."""
        frame = bytearray(struct.pack("<Q", len(data)) + data[: FRAME_BYTES - 8])
        self.send(memoryview(frame.ljust(FRAME_BYTES, b"\0")), to)
        if len(data) > FRAME_BYTES - 8:
            self.send(memoryview(bytearray(data[FRAME_BYTES - 8 :])), to)

    def receive_message(self, source: int) -> bytes:
        """The next message of that rank."""
        frame = bytearray(FRAME_BYTES)
        self.receive(memoryview(frame), source)
        length = struct.unpack_from("<Q", frame)[0]
        rest = bytearray(max(0, length - (FRAME_BYTES - 8)))
        if rest:
            self.receive(memoryview(rest), source)
        return bytes(frame[8 : 8 + length]) + bytes(rest)

    @property
    def _scratch(self) -> memoryview:
        if self._room is None:
            self._room = memoryview(bytearray(PIECE_BYTES))
        return self._room

    def send(self, data: memoryview, to: Sequence[int]) -> None:
        """As ``World``."""
        self._watched(lambda: self.world.send(data, to, DOING))

    def receive(self, into: memoryview, source: int) -> None:
        """As ``World``."""
        self._watched(lambda: self.world.receive(into, source, DOING))

    def _watched(self, action: Callable[[], None]) -> None:
        try:
            action()
        except RankTimeout:
            self.lost = True
            raise


DOING = "handing the state over"


def _batches(orders: Iterable[PieceRequest]) -> Iterator[tuple[int, list[PieceRequest]]]:
    """By rank, as many as go into one answer."""
    open_: dict[int, tuple[int, list[PieceRequest]]] = {}
    for one in orders:
        size, batch = open_.get(one.rank, (0, []))
        if batch and size + _padded(one.length) > PIECE_BYTES:
            yield one.rank, batch
            size, batch = 0, []
        batch.append(one)
        open_[one.rank] = size + _padded(one.length), batch
    for rank, (_, batch) in open_.items():
        yield rank, batch


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _put(data: memoryview, into: torch.Tensor) -> None:
    into.copy_(torch.frombuffer(data, dtype=into.dtype).view(into.shape))
