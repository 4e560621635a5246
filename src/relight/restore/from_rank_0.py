"""Rank 0 alone reads the store: it broadcasts the manifest, receives the boxes that each rank needs, and sends them.

Every rank plans its own restore. Rank 0 reads and verifies the bytes, and cuts them to the requested boxes, a few MiB
at a time.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import torch

from relight.capture.regions import regions_of, sink_of_piece
from relight.capture.sharded import part
from relight.capture.tensors import TORCH_DTYPES, memory_of
from relight.catalog.tiers import TierCopy
from relight.comm import RankTimeout
from relight.decode import from_msgpack
from relight.errors import memory_refusals
from relight.format import Tensor, decode_tree, encode_tree
from relight.format.records import CommitBody
from relight.layout import Box, Sink, skip_of
from relight.layout.shards import boxes_of_run, intersection, placed, relative
from relight.layout.sources import copy_bytes
from relight.log import Checkpoint
from relight.ranks.collective_errors import read_on_all_ranks
from relight.ranks.gather import PIECE_BYTES, WEIGHTS, Rank0Exchange
from relight.ranks.group import SINGLE_RANK
from relight.ranks.one_writer import OneWriter
from relight.ranks.remote_errors import decode_error, encode_error
from relight.reader.merged_parts import MergedCheckpoint, whole_of
from relight.reader.one_writer import saved_by, with_own
from relight.reader.opened import Opened
from relight.restore.find import Places, read_places, reported
from relight.restore.memory_sources import MemorySources
from relight.restore.reader import RestoreReader
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.restore.transport import CheckpointView, CopiesToTry

_DATA, _END, _FAILED = b":", b".", b"-"
_SIZE_BYTES = 8
"""Bytes of a batch's size, which follows ``_DATA``. A receiver needs no memory to read it."""


class _Manifest(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's description of a checkpoint: everything but the tensors' bytes.

    ``own`` has the tree of each rank's own state; an empty entry stands for ``tree``.
    """

    tensors: list[Tensor]
    tree: bytes
    own: list[bytes]
    saved: int
    prefix: str
    environment: dict[str, Any]
    exact: list[str]
    user: dict[str, Any]

    def trees(self) -> tuple[Any, list[Any]]:
        """Return the common tree, and the tree of each rank's own state."""
        count = len(self.tensors)
        tree = decode_tree(self.tree, count, self.prefix)
        return tree, [decode_tree(encoded, count, self.prefix) if encoded else tree for encoded in self.own]


class _Listing(msgspec.Struct, frozen=True, array_like=True):
    """The copies that rank 0 would try, in its order.

    Each row: the tier's position, whether another copy of the same checkpoint follows, and the fields of the log's
    record. ``tiers``: the tiers' names.
    """

    tiers: list[str]
    copies: list[tuple[int, bool, int, str, int, CommitBody]]
    skips: list[tuple[int, int]] = []
    cuts: dict[str, float] = {}


class ReadByRank0:
    """A ``RestoreTransport`` of a job in which only rank 0 opens the store. ``ranks`` is the request's group."""

    def __init__(self, request: RestoreRequest, ranks: OneWriter) -> None:
        self._request, self._ranks, self.reads = request, ranks, ranks.leads
        self._near = MemorySources(request.store, request.run) if ranks.leads else None
        self._places: Places | None = None
        self._opened: tuple[Opened, MergedCheckpoint] | None = None
        self._tensors: Sequence[Tensor] = ()

    def find(self, result: Resumed) -> CopiesToTry:
        """See ``RestoreTransport``. Only rank 0 knows the places."""
        encoded: bytes | None = None
        with read_on_all_ranks(self._ranks, "reading the log"):
            if self._ranks.leads:
                self._places = places = read_places(self._request, result)
                chosen = places.copies_of(reported(places.merged.history, self._request.which))
                listed = [(copy.place, copy.has_next, copy.checkpoint) for copy in chosen]
                rows = [
                    (place, has_next, record.seq, record.time, record.epoch, record.body)
                    for place, has_next, record in listed
                ]
                listing = _Listing([tier.name for tier in places.tiers], rows, result.skips, result.cuts)
                encoded = msgspec.msgpack.encode(listing)
        encoded = self._ranks.world.broadcast(encoded, 0, "choosing a checkpoint")
        with read_on_all_ranks(self._ranks, "choosing a checkpoint"):
            listing = from_msgpack(encoded, _Listing)
            result.skips, result.cuts = listing.skips, listing.cuts
            copies = [
                TierCopy(tier, Checkpoint(seq, time, epoch, body), has_next)
                for tier, has_next, seq, time, epoch, body in listing.copies
            ]
        return CopiesToTry(copies, listing.tiers, self._places.silent if self._places is not None else set())

    def open(self, copy: TierCopy) -> CheckpointView:
        """See ``RestoreTransport``."""
        message, doing = b"", f"opening checkpoint {copy.checkpoint.id}"
        with read_on_all_ranks(self._ranks, doing):
            if self._places is not None and self._near is not None:
                opened = self._places.open(copy)
                joined = whole_of(opened)
                self._opened, message = (opened, joined), _manifest(opened, joined)
                if self._request.only is None:  # before memory is allocated for the tensors
                    check = self._near.check(opened)
                    for number, stored in enumerate(opened.parts):
                        for index in range(len(stored.packs)):
                            check(number, index)
        message = self._ranks.world.broadcast(message if self._ranks.leads else None, 0, doing)
        with read_on_all_ranks(self._ranks, doing):
            manifest = from_msgpack(message, _Manifest)
            tree, own = manifest.trees()
            self._tensors = manifest.tensors
            return CheckpointView(
                manifest.tensors, with_own(tree, own, self._ranks.world.rank), own, manifest.saved, manifest.prefix, manifest.environment,
                manifest.exact, manifest.user,
            )  # fmt: skip

    def read(self, sinks: Mapping[int, Sink]) -> tuple[int, str]:
        """See ``RestoreTransport``. Rank 0 reads each stored byte once, and sends it to the ranks that need it."""
        bytes_read, source = 0, "store"
        # A rank without memory for these must not leave rank 0 waiting: all ranks raise before any byte is sent.
        with read_on_all_ranks(self._ranks, "requesting the state"):
            needs = {
                index: _boxes(sink, self._tensors[index])
                for index, sink in sinks.items()
                if self._tensors[index].length
            }
            request, room = b"", memoryview(b"")
            if not self._ranks.leads:
                request, room = msgspec.msgpack.encode(list(needs.items())), memoryview(bytearray(PIECE_BYTES))
        with read_on_all_ranks(self._ranks, "receiving the state"):
            if self._opened is None or self._near is None:
                self._ranks.desk.send_message(request, [0])
                _receive_bytes(self._ranks.desk, sinks, self._tensors, room)
            else:
                (opened, joined), self._opened = self._opened, None
                bytes_read, source = _send_bytes(opened, joined, sinks, needs, self._near, self._ranks)
        return bytes_read, source

    def close(self, error: BaseException | None) -> None:
        """See ``RestoreTransport``. If a rank did not answer, this job exchanges nothing more."""
        if isinstance(error, RankTimeout):
            self._ranks.mark_lost()
        if self._near is not None:
            self._near.close()


def _manifest(opened: Opened, joined: MergedCheckpoint) -> bytes:
    root, own = opened.root, [b"" if tree is joined.tree else encode_tree(tree) for tree in joined.own]
    manifest = _Manifest(
        list(joined.tensors),
        encode_tree(joined.tree),
        own,
        saved_by(root),
        opened.prefix,
        root.environment,
        list(root.exact),
        root.user,
    )
    return msgspec.msgpack.encode(manifest)


def _boxes(sink: Sink, tensor: Tensor) -> list[Box]:
    """Return the boxes of a tensor that this rank's sink needs."""
    return list(dict.fromkeys(region.box for region in regions_of(sink, tensor.shape) if region.box.elements))


# -- rank 0


class _Distributor:
    """Distributes the bytes that are read: to this rank's sinks at once, to other ranks in batches of some MiB.
    Thread-safe."""

    def __init__(self, desk: Rank0Exchange, sinks: Mapping[int, Sink], tensors: Sequence[Tensor]) -> None:
        self._desk, self._sinks, self._tensors = desk, sinks, tensors
        self._lock = threading.Lock()
        self._batches: dict[tuple[int, ...], _Batch] = {}

    def deliver(self, index: int, ranks: tuple[int, ...], box: Box, data: torch.Tensor) -> None:
        """Deliver ``data``, which is ``box`` of tensor ``index``, to ``ranks``."""
        contiguous = data.contiguous()
        memory = memory_of(contiguous)
        assert memory is not None
        with self._lock:
            if ranks == (0,):
                _put(self._sinks[index], self._tensors[index], box, memory)
                return
            batch = self._batches.setdefault(ranks, _Batch())
            if batch.data and len(batch.data) + len(memory) > PIECE_BYTES:
                self._post(ranks)
                batch = self._batches.setdefault(ranks, _Batch())
            batch.heads.append((index, box))
            batch.data += memory

    def flush(self) -> None:
        """Send the remaining batches."""
        with self._lock:
            for ranks in list(self._batches):
                self._post(ranks)

    def end(self, outcome: bytes) -> None:
        """Send ``outcome`` to all other ranks, and no more bytes."""
        with self._lock:
            self._batches = {}
            self._desk.send_message(outcome, range(1, self._desk.world.size))

    def _post(self, ranks: tuple[int, ...]) -> None:
        batch = self._batches.pop(ranks)
        size = len(batch.data).to_bytes(_SIZE_BYTES, "little")
        self._desk.send_message(_DATA + size + msgspec.msgpack.encode(batch.heads), ranks)
        self._desk.send(memoryview(batch.data), ranks)


class _Batch:
    def __init__(self) -> None:
        self.heads: list[tuple[int, Box]] = []
        self.data = bytearray()


class _DistributingSink:
    """A sink for the stored piece ``box`` of tensor ``index``.

    ``wanted``: the boxes that are needed, and the ranks that need each.
    """

    def __init__(
        self,
        distributor: _Distributor,
        index: int,
        tensor: Tensor,
        box: Box,
        wanted: Sequence[tuple[tuple[int, ...], Box]],
    ) -> None:
        self._distributor, self._index, self._box, self._wanted = distributor, index, box, wanted
        self._weight = TORCH_DTYPES[tensor.dtype].itemsize
        self.length = box.elements * self._weight

    def view(self) -> memoryview | None:
        """Return None: the bytes go to several places."""
        return None

    def absorb(self, start: int, data: memoryview) -> None:
        """Cut the bytes into the wanted boxes, and deliver each to its ranks."""
        elements = torch.frombuffer(data, dtype=WEIGHTS[self._weight])
        first, offset, step = start // self._weight, 0, PIECE_BYTES // self._weight
        end = first + len(elements)
        # in pieces, as a receiver has memory for PIECE_BYTES
        for run in (
            run
            for begin in range(first, end, step)
            for run in boxes_of_run(self._box.size, begin, min(end, begin + step))
        ):
            box = placed(run, self._box)
            values = elements[offset : offset + run.elements].view(run.size)
            offset += run.elements
            for ranks, wanted in self._wanted:
                shared = intersection(box, wanted)
                if shared is not None:
                    self._distributor.deliver(self._index, ranks, shared, part(values, relative(shared, box)))


def _send_bytes(
    opened: Opened,
    joined: MergedCheckpoint,
    sinks: Mapping[int, Sink],
    needs: Mapping[int, list[Box]],
    near: MemorySources,
    ranks: OneWriter,
) -> tuple[int, str]:
    """Read the bytes that all ranks need, and send them. Return the bytes read and their source. If they cannot be read,
    raise the error, here and on the other ranks."""
    desk, world = ranks.desk, ranks.world.size
    distributor = _Distributor(desk, sinks, joined.tensors)
    try:
        with memory_refusals("sending the state"):
            # all requests before any is decoded: a rank that still sends one cannot receive an error
            requests = [b"", *(desk.receive_message(rank) for rank in range(1, world))]
            wanted: dict[int, dict[Box, list[int]]] = {}
            for rank in range(world):
                for index, boxes in needs.items() if rank == 0 else _decode_boxes(requests[rank]):
                    for box in boxes:
                        wanted.setdefault(index, {}).setdefault(box, []).append(rank)
            by_part: list[dict[int, Sink]] = [{} for _ in opened.parts]
            for index, owners in wanted.items():
                for piece in joined.pieces[index]:
                    sink = _sink(distributor, index, joined.tensors[index], piece.box, owners, sinks)
                    if sink is not None:
                        by_part[piece.part][piece.tensor] = sink
            reading = RestoreReader(opened, by_part, near, SINGLE_RANK)
            reading.from_memory()
            reading.from_store()
            distributor.flush()
    except RankTimeout:
        raise
    except BaseException as error:  # of any kind: the other ranks wait for an end
        distributor.end(_FAILED + encode_error(error))
        raise
    distributor.end(_END)
    return reading.bytes_read, reading.source


def _decode_boxes(word: bytes) -> Iterator[tuple[int, list[Box]]]:
    yield from from_msgpack(word, list[tuple[int, list[Box]]])


def _sink(
    distributor: _Distributor,
    index: int,
    tensor: Tensor,
    box: Box,
    wanted: Mapping[Box, Sequence[int]],
    sinks: Mapping[int, Sink],
) -> Sink | None:
    """Return the sink for a stored piece: this rank's own if no other rank needs any of it, a distributing one
    otherwise, None if no rank needs it."""
    needed = [
        (tuple(ranks), box_needed) for box_needed, ranks in wanted.items() if intersection(box_needed, box) is not None
    ]
    if not needed:
        return None
    if all(ranks == (0,) for ranks, _ in needed):
        return sink_of_piece(sinks[index], tensor.shape, TORCH_DTYPES[tensor.dtype], box)
    own = [((0,), box_needed) for ranks, box_needed in needed if 0 in ranks]
    others = [(rest, box_needed) for ranks, box_needed in needed if (rest := tuple(rank for rank in ranks if rank))]
    return _DistributingSink(distributor, index, tensor, box, [*own, *others])


# -- the others


def _receive_bytes(desk: Rank0Exchange, sinks: Mapping[int, Sink], tensors: Sequence[Tensor], room: memoryview) -> None:
    """Receive batches in ``room`` and write them to the sinks, until rank 0 reports the end. Raise rank 0's error, or this rank's own."""
    while (batch := _receive_batch(desk, room)) is not None:
        try:
            _put_batch(*batch, sinks, tensors)
        except BaseException:  # of the user's storage, of a device or of memory: rank 0 sends the rest all the same
            while _receive_batch(desk, room) is not None:
                pass
            raise


def _receive_batch(desk: Rank0Exchange, room: memoryview) -> tuple[bytes, memoryview] | None:
    """Return the next batch's encoded boxes and its bytes, which are in ``room``; None at the end. Raise rank 0's error."""
    message = desk.receive_message(0)
    if message[:1] == _END:
        return None
    if message[:1] == _FAILED:
        raise decode_error(message[1:])
    data = room[: int.from_bytes(message[1 : 1 + _SIZE_BYTES], "little")]
    desk.receive(data, 0)
    return message[1 + _SIZE_BYTES :], data


def _put_batch(encoded: bytes, data: memoryview, sinks: Mapping[int, Sink], tensors: Sequence[Tensor]) -> None:
    """Write a batch to the sinks. ``encoded``: the tensor and the box of each piece of ``data``."""
    offset = 0
    for index, box in from_msgpack(encoded, list[tuple[int, Box]]):
        length = box.elements * TORCH_DTYPES[tensors[index].dtype].itemsize
        _put(sinks[index], tensors[index], box, data[offset : offset + length])
        offset += length


def _put(sink: Sink, tensor: Tensor, box: Box, data: memoryview) -> None:
    """Write ``data``, which is ``box`` of the tensor, to the part of ``sink`` that has it."""
    target = sink_of_piece(sink, tensor.shape, TORCH_DTYPES[tensor.dtype], box)
    if target is None:
        return
    skip = skip_of(target)
    data = data[skip : skip + target.length]
    view = target.view()
    if view is not None:
        copy_bytes(data, view)
    else:
        target.absorb(0, data)
