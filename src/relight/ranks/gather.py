"""Rank 0 gathers the other ranks' tensors: it requests boxes, and they send them, a few MiB at a time, straight into
the target memory.

Rank 0's state has sources (``GatheredSource``) that request bytes when they are read. So they are read like any other
source: into a slot of the agent's memory, or slab by slab into a pack. Meanwhile the other ranks answer
(``Rank0Exchange.answer_requests``) until rank 0 sends the end.
"""

from __future__ import annotations

import contextlib
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
from relight.comm import Communicator, RankTimeout, new_threads
from relight.layout import Box, Item, Source, whole
from relight.layout.rank_tables import Work
from relight.layout.routes import Route
from relight.layout.shards import LocalBox, boxes_of_run, intersection, relative
from relight.layout.sources import copy_from
from relight.ranks.part_items import source_of
from relight.ranks.remote_errors import decode_failure, encode_failure

PIECE_BYTES = 4 << 20
"""Most bytes that one request asks for, and one answer has."""
AHEAD = 2
"""Number of requests that wait for an answer at the same time, each of another rank."""
SMALL_BYTES = 64 << 10
"""Tensors up to this size are requested together: a request costs more than their bytes."""
SMALL_HELD_BYTES = 8 << 20
"""Most bytes of small tensors that are kept before they are read."""
FRAME_BYTES = 1 << 10
"""Size of a message's first frame; a longer message has a second frame with the rest."""
_ALIGN = 16
WEIGHTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
"""Elements that every kernel can copy, by bytes."""
_END, _ASK, _WAIT = b".", b"?", b"~"


class PieceRequest(NamedTuple):
    """``box`` of the global shape, from piece ``piece`` of a rank's entry ``entry``; ``into`` is where it goes."""

    rank: int
    entry: int
    piece: int
    box: Box
    into: torch.Tensor

    @property
    def length(self) -> int:
        """Bytes of the box."""
        return self.into.nbytes


class HeldPieces:
    """The tensors that a rank can send: its items, and the pieces of each that it has."""

    def __init__(
        self, items: Sequence[Item], spreads: Mapping[int, ShardingOf], pieces: Sequence[Sequence[LocalBox]]
    ) -> None:
        """``pieces`` has the pieces of the first items; the rank has all later items whole."""
        self._items, self._spreads = items, spreads
        self._pieces = [
            *pieces,
            *([LocalBox(whole(item.shape), (0,) * len(item.shape))] for item in items[len(pieces) :]),
        ]

    def source(self, entry: int, piece: int, box: Box) -> Source:
        """Return a source for the bytes of that box."""
        return source_of(self._items[entry], self._spreads.get(entry), self._pieces[entry], Work(entry, box, piece))


class GatheredSource:
    """A source for all bytes of a tensor of ``shape`` that is spread over ranks. Read it before the gathering ends."""

    def __init__(self, desk: Rank0Exchange, shape: Sequence[int], weight: int, routes: Sequence[Route]) -> None:
        self._desk, self.shape, self.weight, self.routes = desk, tuple(shape), weight, routes
        self.length = prod(self.shape) * weight

    def view(self) -> memoryview | None:
        """Return None: the bytes are on other ranks."""
        return None

    def fill(self, start: int, into: memoryview) -> None:
        """Request the bytes and copy them to ``into``. One call at a time. Raise ``RankTimeout`` if a rank does not
        answer."""
        self._desk.fill(self, start, into)

    def orders(self, start: int, into: memoryview) -> Iterator[PieceRequest]:
        """Yield the requests for the bytes from ``start`` on: boxes of at most ``PIECE_BYTES``."""
        flat = torch.frombuffer(into, dtype=WEIGHTS[self.weight])
        begin, end = start // self.weight, start // self.weight + len(flat)
        step = PIECE_BYTES // self.weight
        for first in range(begin, end, step):
            offset = first - begin
            for box in boxes_of_run(self.shape, first, min(end, first + step)):
                target = flat[offset : offset + box.elements].view(box.size)
                offset += box.elements
                for route in self.routes:
                    shared = intersection(box, route.box)
                    if shared is not None:
                        yield PieceRequest(
                            route.rank, route.entry, route.piece, shared, part(target, relative(shared, box))
                        )


class Rank0Exchange:
    """One rank's side of the gathering. On rank 0, one thread at a time may use it."""

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
        """Whether a rank did not answer. Then nothing more can be exchanged."""
        self.absent: set[int] = set()
        """Ranks that have failed before this gathering, and do not wait for its end."""

    # -- rank 0

    def begin(self, offers: HeldPieces, sources: Iterable[GatheredSource]) -> None:
        """Start a gathering on rank 0. ``offers``: rank 0's own tensors; ``sources``: what will be read, in the likely
        order."""
        self._offers, self._held, self._held_bytes = offers, {}, 0
        self._small = [source for source in sources if source.length <= SMALL_BYTES]
        self._place = {id(source): index for index, source in enumerate(self._small)}

    def fill(self, source: GatheredSource, start: int, into: memoryview) -> None:
        """See ``GatheredSource.fill``."""
        with self._lock:
            if id(source) not in self._place:
                self._pull(source.orders(start, into))
                return
            index = self._place[id(source)]
            if index not in self._held:
                self._pull_small(index)
            data = self._held[index]
            into[:] = data[start : start + len(into)]
            if start + len(into) == len(data):
                del self._held[index]
                self._held_bytes -= len(data)

    def end(self, outcome: bytes, *, over: bool = True) -> None:
        """End the gathering: ``answer_requests`` returns ``outcome`` on the other ranks. Send nothing if they are
        lost."""
        if over:
            self._offers, self._held, self._small, self._place, self._room = None, {}, [], {}, None
        if not self.lost:
            self.send_message(_END + outcome, self._others)

    @contextlib.contextmanager
    def keep_waiting(self, every_s: float) -> Iterator[None]:
        """Send the other ranks a message every ``every_s`` seconds while the block runs on rank 0.

        Writing may take longer than their deadline, which is for a silent rank 0. Without a thread, nothing is sent.
        """
        over = threading.Event()

        def send() -> None:
            while not over.wait(every_s):
                with self._lock, contextlib.suppress(RankTimeout):  # no rank sends an answer while the lock is free
                    if over.is_set() or self.lost:
                        return
                    self.send_message(_WAIT, self._others)

        thread = threading.Thread(target=send, name="relight-keep-waiting", daemon=True)
        started = new_threads.start(thread)
        try:
            yield
        finally:
            over.set()
            if started:
                thread.join()

    @property
    def _others(self) -> list[int]:
        """Ranks that wait for the end of the gathering."""
        return [rank for rank in range(self.world.size) if rank != self.world.rank and rank not in self.absent]

    def _pull_small(self, at: int) -> None:
        """Request the small tensor ``at``, and later ones that will be read soon."""
        orders: list[PieceRequest] = []
        pulled: dict[int, bytearray] = {}
        taken = 0
        for number in range(at, len(self._small)):
            length = self._small[number].length
            if taken and (taken + length > PIECE_BYTES or self._held_bytes + taken + length > SMALL_HELD_BYTES):
                break
            if number not in self._held:
                pulled[number] = bytearray(length)
                taken += length
                orders += self._small[number].orders(0, memoryview(pulled[number]))
        self._pull(orders)
        self._held.update(pulled)  # after an error, the memory does not have the bytes
        self._held_bytes += taken

    def _pull(self, orders: Iterable[PieceRequest]) -> None:
        """Request the bytes and receive them. If a rank answers with an error, or this rank has one, receive the other
        answers before raising it: each was requested, and its rank waits until it is received."""
        room, under_way = self._scratch, deque[tuple[int, list[PieceRequest]]]()  # no answer can be received without it
        error: Exception | None = None
        try:
            for rank, batch in _batches(orders):
                if rank == self.world.rank:
                    self._take_own(batch)
                    continue
                # a rank that sends an answer receives nothing meanwhile: a second request to it would wait for ever
                while len(under_way) == AHEAD or any(rank == asked for asked, _ in under_way):
                    self._take(*under_way.popleft(), room)
                self.send_message(
                    _ASK + msgspec.msgpack.encode([(each.entry, each.piece, each.box) for each in batch]), [rank]
                )
                under_way.append((rank, batch))
        except RankTimeout:
            raise
        except Exception as caught:  # any error, also another rank's
            error = caught
        for rank, batch in under_way:
            try:
                self._take(rank, batch, room)
            except RankTimeout:
                raise
            except Exception as caught:
                error = error or caught
        if error is not None:
            raise error

    def _take(self, rank: int, batch: list[PieceRequest], room: memoryview) -> None:
        failure = self.receive_message(rank)
        if failure:
            raise decode_failure(failure, rank)
        memory = memory_of(batch[0].into) if len(batch) == 1 else None
        if memory is not None and not len(memory) % _ALIGN:
            self.receive(memory, rank)
            return
        room = room[: sum(_padded(request.length) for request in batch)]
        self.receive(room, rank)
        offset = 0
        for request in batch:
            _put(room[offset : offset + request.length], request.into)
            offset += _padded(request.length)

    def _take_own(self, batch: list[PieceRequest]) -> None:
        assert self._offers is not None
        for request in batch:
            source, memory = self._offers.source(request.entry, request.piece, request.box), memory_of(request.into)
            room = memory if memory is not None else self._scratch[: request.length]
            copy_from(source, 0, room)
            if memory is None:
                _put(room, request.into)

    # -- the others

    def answer_requests(self, offers: HeldPieces | Exception) -> bytes:
        """Send the bytes that rank 0 requests, until it sends the end. Return the outcome. Raise ``RankTimeout`` if
        rank 0 is silent.

        Each answer is an empty message and the bytes, or an error alone: one that reading the bytes has raised, or
        ``offers``, if this rank has nothing to offer.
        """
        try:
            while True:
                message = self.receive_message(0)
                if message[:1] == _END:
                    return message[1:]
                if message[:1] == _WAIT:
                    continue
                data, failure = memoryview(b""), b""
                try:
                    if isinstance(offers, Exception):
                        raise offers
                    data = self._read(offers, message[1:])
                except Exception as error:  # any error: rank 0 waits for this answer
                    failure = encode_failure(error)
                self.send_message(failure, (0,))
                if not failure:
                    self.send(data, (0,))
        finally:
            self._room = None

    def _read(self, offers: HeldPieces, request: bytes) -> memoryview:
        offset = 0
        for entry, piece, (start, size) in msgspec.msgpack.decode(request):
            source = offers.source(entry, piece, Box(tuple(start), tuple(size)))
            copy_from(source, 0, self._scratch[offset : offset + source.length])
            offset += _padded(source.length)
        return self._scratch[:offset]

    # -- words

    def send_message(self, data: bytes, to: Sequence[int]) -> None:
        """Send a message of any length."""
        frame = (struct.pack("<Q", len(data)) + data[: FRAME_BYTES - 8]).ljust(FRAME_BYTES, b"\0")
        # all memory before the first frame: a receiver that has it waits for the second one
        frames = [bytearray(frame), *([bytearray(data[FRAME_BYTES - 8 :])] if len(data) > FRAME_BYTES - 8 else [])]
        for each in frames:
            self.send(memoryview(each), to)

    def receive_message(self, source: int) -> bytes:
        """Return the next message of that rank."""
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
        """See ``Communicator.send``."""
        self._watched(lambda: self.world.send(data, to, DOING))

    def receive(self, into: memoryview, source: int) -> None:
        """See ``Communicator.receive``."""
        self._watched(lambda: self.world.receive(into, source, DOING))

    def _watched(self, action: Callable[[], None]) -> None:
        try:
            action()
        except RankTimeout:
            self.lost = True
            raise


DOING = "handing the state over"


def _batches(orders: Iterable[PieceRequest]) -> Iterator[tuple[int, list[PieceRequest]]]:
    """Group requests by rank, as many as fit into one answer."""
    open_: dict[int, tuple[int, list[PieceRequest]]] = {}
    for request in orders:
        size, batch = open_.get(request.rank, (0, []))
        if batch and size + _padded(request.length) > PIECE_BYTES:
            yield request.rank, batch
            size, batch = 0, []
        batch.append(request)
        open_[request.rank] = size + _padded(request.length), batch
    for rank, (_, batch) in open_.items():
        yield rank, batch


def _padded(length: int) -> int:
    return -(-length // _ALIGN) * _ALIGN


def _put(data: memoryview, into: torch.Tensor) -> None:
    into.copy_(torch.frombuffer(data, dtype=into.dtype).view(into.shape))
