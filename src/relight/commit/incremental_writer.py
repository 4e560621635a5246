"""Packs of which only what is new is written, coded where that makes it smaller.

What the attempt's last checkpoint has is known by the hashes of its chunks: a chunk that is there already is named, wherever it lies, and
not written. Others are coded if a sample says that they become smaller. All own bytes of a pack go into one file, in the order of its
chunks. Chunks are hashed and coded by a few threads, ahead of what is written.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import accumulate
from typing import NamedTuple

from relight.comm.new_threads import ThreadPool
from relight.commit.chunk_index import MARK_BYTES, MARKS, IncrementalState, IndexedChunk, KnownChunks, placed
from relight.commit.fp32_masters import Masters
from relight.commit.pack_writer import WriteLimits, WriteStats
from relight.commit.plan import PackPlan, SavePlan
from relight.errors import NoSpace
from relight.format import Digest, Tensor, dtype_named
from relight.format.chunk_locations import DERIVED, LOSSY, OWN, ChunkLocation, PackChunks
from relight.format.codecs import ElementKind, choose, difference, encode, kind_of, unchanged
from relight.format.entropy import Compress, compress, trial_of
from relight.format.lossy import RUNS_MAX, LossyRange, encode_lossy
from relight.format.manifest import Pack, contents, tensors_in
from relight.format.names import stored_file
from relight.format.planes import Rooms
from relight.layout.sources import copy_from
from relight.policy.compact import AUDIT_BYTES, EQUAL_MIN, Choice, CodecSample, Compact, bound_for, lossy_ways
from relight.store import PAGE, ByteStore, Writer, page_buffer
from relight.store.base import encrypts

HELD_BYTES = 16 << 20
"""What is gathered before it is written; a pack with no more than that of its own is announced to the store with its very size."""
AHEAD = 8
"""Chunks that may be hashed and coded ahead of what is written."""
INLINE_BYTES = 1 << 20
SAMPLED, SAMPLED_BYTES = 6, 512 << 10
"""Kinds of chunks of which one is coded to see what it comes to, and how much of it: it is
done before a save is told of, in the midst of training."""
READ_MAX = 1.75
"""What a reader may have to read of a chunk, all that it differs from included, over the chunk itself: so long are chains at most."""
UNCHANGED_MIN = 0.75
"""If at least this share of a chunk is unchanged, its differences are stored: they are a small part of it, and coded quickly."""
_NO_BYTES = memoryview(b"")
_OWN = threading.local()


class _Chunk(NamedTuple):
    """What a thread made of one."""

    hash: bytes
    where: IndexedChunk | None
    """Where it lies already."""
    body: memoryview | bytes
    """What is to be stored, if it does not."""
    coded: bool | int
    base: IndexedChunk | None = None
    """Where the chunk lies that it was coded as differences from."""
    took_s: float = 0.0
    """That it took to code it, or to see that this gains nothing."""


class _Coder(NamedTuple):
    """Makes what is to be stored of chunks of the ``place``-th pack. ``elements``: of a chunk, and ``kinds``: its dtype and role, by its
    number. Any thread."""

    elements: Sequence[ElementKind]
    kinds: Sequence[str]
    known: KnownChunks
    place: int
    coded: Collection[int]
    """The numbers of those that are coded, if that makes them smaller."""
    spent: WriteStats
    """Told how long hashing took."""
    masters: Masters | None = None
    lossy: Mapping[int, list[LossyRange]] = {}
    """How chunks are stored that need not be exact, by their numbers."""
    same: Mapping[int, tuple[bytes, IndexedChunk]] = {}
    """Of chunks that are what they were, by their numbers: the hash, and where they are. They are not read."""
    by: Compress = compress

    def make(self, number: int, at: int, data: memoryview) -> _Chunk:
        """Of chunk ``number``, which begins at byte ``at`` of the pack."""
        if number in self.same:
            return _Chunk(*self.same[number], _NO_BYTES, False)
        inexact = encode_lossy(data, self.lossy[number], self.by) if number in self.lossy else None
        if inexact is not None:
            stored, near = inexact
            value = Digest(near).digest()
            where = self.known.chunks.get((value, len(near)))
            return _Chunk(value, where, _NO_BYTES, False) if where is not None else _Chunk(value, None, stored, LOSSY)
        with self.spent.hashing():
            value = Digest(data).digest()
        kind = self.elements[number]
        where = self.known.chunks.get((value, len(data)))
        if where is not None:
            return _Chunk(value, where, _NO_BYTES, False)
        derived = self.masters.derive(number, data) if self.masters is not None else None
        if derived is not None:
            return _Chunk(value, None, derived, DERIVED)
        if number not in self.coded:
            return self._little_changed(number, at, data, value) or _Chunk(value, None, data, False)
        began = time.perf_counter()
        earlier = self.known.base(self.place, number, at, len(data)) if number not in self.lossy else None
        base, where = earlier or (None, None)
        rooms = _rooms()
        way = choose(data, kind, base, trial_of(self.by))
        if way is not None and way.difference and self.known.before is not None:
            body = encode(data, way, base, rooms, self.by)
            if body is not None and self._may_stand(where, len(body), len(data)):
                return _Chunk(value, None, body, True, where, time.perf_counter() - began)
            way = choose(data, kind, None, trial_of(self.by))
        body = None if way is None else encode(data, way, None, rooms, self.by)
        return _Chunk(value, None, data if body is None else body, body is not None, None, time.perf_counter() - began)

    def _little_changed(self, number: int, at: int, data: memoryview, value: bytes) -> _Chunk | None:
        """Return the chunk as differences from the save before if most of it is unchanged, whatever codecs cost; None otherwise."""
        earlier = self.known.base(self.place, number, at, len(data)) if number not in self.lossy else None
        if earlier is None or unchanged(data, earlier[0]) < UNCHANGED_MIN:
            return None
        base, where = earlier
        body = encode(data, difference(self.elements[number], len(data)), base, _rooms(), trial_of(self.by))
        if body is None or not self._may_stand(where, len(body), len(data)):
            return None
        return _Chunk(value, None, body, True, where)

    def _may_stand(self, where: IndexedChunk | None, stored: int, length: int) -> bool:
        """Whether differences from there are read for little enough, and what they differ from did not change while they were made."""
        before = self.known.before
        return where is not None and stored + where.piece.reach <= READ_MAX * length and before is not None and before.still()


def _rooms() -> Rooms:
    """This thread's memory for coding."""
    found: Rooms | None = getattr(_OWN, "rooms", None)
    if found is None:
        found = _OWN.rooms = Rooms()
    return found


def write_smaller_packs(
    store: ByteStore,
    prefix: str,
    plan: SavePlan,
    known: KnownChunks,
    choice: Choice,
    pace: WriteLimits,
    rules: Compact,
    by: Compress = compress,
) -> tuple[list[Pack], float]:
    """Write what is new of all packs below ``prefix``, durable but for their names; what the part says of them, and how long finishing
    took, in seconds. ``known``: what need not be written, or not all of it; ``choice``: what is coded of what is written, where that makes
    it smaller; ``by``: who makes frames of planes."""
    written = [
        write_smaller(store, prefix, pack, _coder_of(pack, plan.tensors, index, known, choice, rules, pace.spent)._replace(by=by), pace)
        for index, pack in enumerate(plan.packs)
    ]
    return [pack for pack, _ in written], sum(fsync_s for _, fsync_s in written)


def write_smaller(store: ByteStore, prefix: str, plan: PackPlan, coder: _Coder, pace: WriteLimits) -> tuple[Pack, float]:
    """Write what is new of ``plan``; what the part says of the pack, and how long finishing took, in seconds.

    Memory: ``AHEAD`` chunks, twice where they are coded, and ``HELD_BYTES``.
    """
    homes: dict[tuple[str, str], int] = {}
    pieces: list[ChunkLocation] = []
    hashes: list[bytes] = []
    out = _Out(store, f"{prefix}/{stored_file(plan.file)}", plan.size, pace.spent)
    try:
        for number, (length, chunk) in enumerate(zip(plan.chunks, _made(plan, coder, pace), strict=True)):
            hashes.append(chunk.hash)
            if chunk.where is not None:
                pieces.append(placed(chunk.where, homes))
                out.spare(length)
            else:
                value = Digest(chunk.body).digest() if chunk.coded else chunk.hash
                base = None if chunk.base is None else placed(chunk.base, homes)
                pieces.append(ChunkLocation(OWN, out.size, len(chunk.body), chunk.coded, value, base))
                out.put(memoryview(chunk.body), length)
            if chunk.took_s:
                pace.spent.add_coded(coder.kinds[number], length, chunk.took_s)
            if pace.progress is not None:
                pace.progress(length)
        before = time.perf_counter()
        out.finish()
        fsync_s = time.perf_counter() - before
    except BaseException:
        out.abort()
        raise
    stored = PackChunks(out.size, list(homes), pieces)
    return Pack(plan.file, plan.size, list(zip(plan.chunks, hashes, strict=True)), stored), fsync_s


def _coder_of(
    plan: PackPlan, tensors: list[Tensor], index: int, known: KnownChunks, choice: Choice, rules: Compact, spent: WriteStats
) -> _Coder:
    def exact(tensor: Tensor) -> bool:
        return not lossy_ways(rules, tensor.name, tensor.dtype)

    classes = [("uint8", "header"), *(of for of, _, _ in contents(plan.chunks, tensors, index))]
    kinds, elements = [_kind_name(of) for of in classes], [kind_of(dtype_named(dtype)) for dtype, _ in classes]
    coded = [n for n, kind in enumerate(kinds) if choice.coded and (n == 0 or choice.kinds is None or kind in choice.kinds)]
    masters = Masters(plan, tensors, index, exact) if choice.coded else None
    same = same_chunks(plan, tensors, index, known)
    return _Coder(elements, kinds, known, index, frozenset(coded), spent, masters, lossy_of(plan, tensors, index, rules), same)


def _kind_name(of: tuple[str, str]) -> str:
    """A dtype and a role."""
    return " ".join(of)


def same_chunks(plan: PackPlan, tensors: list[Tensor], index: int, known: KnownChunks) -> dict[int, tuple[bytes, IndexedChunk]]:
    """Chunks of pack ``index`` that hold nothing but what is as it was, by their numbers: hash, and where they are."""
    if not known.same:
        return {}
    same, found = {id(tensors[number]) for number in known.same}, dict[int, tuple[bytes, IndexedChunk]]()
    for number, (_, held) in enumerate(tensors_in(plan.chunks, tensors, index)):
        there = known.there(index, number, plan.chunks[number])
        if there is not None and held and all(id(tensor) in same for tensor, _, _ in held):
            found[number] = there
    return found


def audited(smaller: IncrementalState, plan: SavePlan, known: KnownChunks, wrong: Callable[[str], None]) -> KnownChunks:
    """``known``, once some of the chunks that are said to be as they were, others each time, have been read and hashed: if one is not, none
    is believed, and the name of a tensor in it is told. Cost: hashing ``AUDIT_BYTES``."""
    chunks = [
        (index, pack, number, value)
        for index, pack in enumerate(plan.packs)
        for number, (value, where) in same_chunks(pack, plan.tensors, index, known).items()
        if not where.piece.lossy
    ]
    left = AUDIT_BYTES
    for _ in range(len(chunks)):
        index, pack, number, value = chunks[smaller.audited % len(chunks)]
        smaller.audited += 1
        at, length = sum(pack.chunks[:number]), pack.chunks[number]
        if Digest(_range(pack, at, length)).digest() != value:
            wrong(next(one.name for one in plan.tensors if one.pack == index and one.offset < at + length and at < one.offset + one.length))
            return known._replace(same=frozenset())
        left -= length
        if left <= 0:
            break
    return known


def lossy_of(plan: PackPlan, tensors: list[Tensor], index: int, rules: Compact) -> dict[int, list[LossyRange]]:
    """Of each chunk of pack ``index`` some of which may be stored inexactly: its runs, a tensor each, or a piece of one."""
    if not rules.inexact:
        return {}
    found = dict[int, list[LossyRange]]()
    for number, (_, held) in enumerate(tensors_in(plan.chunks, tensors, index)):
        runs = [_stretch(rules, tensor, end - begin) for tensor, begin, end in held]
        if any(run.ways for run in runs) and len(runs) <= RUNS_MAX:
            found[number] = runs
    return found


def _stretch(rules: Compact, tensor: Tensor, length: int) -> LossyRange:
    """How ``length`` bytes of a tensor may be stored."""
    bound = bound_for(rules, tensor.name, tensor.dtype)
    ways = lossy_ways(rules, tensor.name, tensor.dtype)
    return LossyRange(length, ways) if bound is None else LossyRange(length, ways, bound.most, bound.relative)


class _Class(NamedTuple):
    """The chunks of one dtype and role, ``(pack, offset, length)``, that must be written; and how many bytes of them were derived."""

    chunks: list[tuple[PackPlan, int, int]]
    derived: int

    @property
    def bytes(self) -> int:
        """Of them all."""
        return sum(length for _, _, length in self.chunks)


def sampled(plan: SavePlan, packs: Sequence[Pack], by: Compress = compress) -> list[CodecSample]:
    """What coding a save like this gains, by kind, and takes: of a sample of one chunk of each of the largest kinds. ``packs``: how it was
    stored; what lay there already, or is stored inexactly, need not be coded. Cost: coding ``SAMPLED`` times ``SAMPLED_BYTES``."""
    classes = _classes(plan, packs)
    whole = sum(one.bytes for one in classes.values())
    here = trial_of(by) is by
    clock = time.thread_time if here else time.perf_counter  # who waits for a device takes no processor time
    found, rooms = [], Rooms()
    for of, held in sorted(classes.items(), key=lambda one: -one[1].bytes)[:SAMPLED]:
        pack, at, length = held.chunks[len(held.chunks) // 2]
        data = _range(pack, at, min(length, SAMPLED_BYTES) if here else length)  # a device is for whole chunks
        began = clock()
        way = choose(data, kind_of(dtype_named(of[0])), None, trial_of(by))
        chosen = clock()
        body = None if way is None else encode(data, way, rooms=rooms, by=by)
        rate = (chosen - began) / length + (clock() - chosen) / len(data)
        share = (1.0 if body is None else len(body) / len(data)) * (1 - held.derived / held.bytes)
        found.append(CodecSample(_kind_name(of), held.bytes / whole, share, rate))
    return found


def _classes(plan: SavePlan, packs: Sequence[Pack]) -> dict[tuple[str, str], _Class]:
    found: dict[tuple[str, str], _Class] = {}
    for index, (pack, written) in enumerate(zip(plan.packs, packs, strict=True)):
        for number, (of, at, length) in enumerate(contents(pack.chunks, plan.tensors, index), 1):
            piece = written.stored.pieces[number] if written.stored is not None else None
            if piece is None or (piece.home == OWN and not piece.lossy):
                held = found.get(of) or _Class([], 0)
                held.chunks.append((pack, at, length))
                found[of] = held._replace(derived=held.derived + (length if piece is not None and piece.derived else 0))
    return found


def marks_of(plan: SavePlan) -> dict[tuple[int, int], bytes]:
    """Samples of every chunk but the packs' headers, by pack and number. Cost: a few reads of 16 bytes a chunk."""
    return {place: mark for place, _, mark in _marks(plan)}


def alike(plan: SavePlan, smaller: IncrementalState) -> float:
    """Return the share of the save that may be as in an earlier one, by samples; at least ``EQUAL_MIN`` is not counted to its end.

    What the samples miss is stored once more: a chunk that kept most of its bytes and none of those that were sampled.
    """
    whole, found = max(plan.logical_bytes, 1), 0
    for place, length, mark in _marks(plan):
        found += length if smaller.may_be_there(place, mark) else 0
        if found >= EQUAL_MIN * whole:
            break
    return found / whole


def _marks(plan: SavePlan) -> Iterator[tuple[tuple[int, int], int, bytes]]:
    for index, pack in enumerate(plan.packs):
        edges = [0, *accumulate(source.length for source in pack.sources)] if pack.image is None else []
        at = 0
        for number, length in enumerate(pack.chunks):
            step = max(length - MARK_BYTES, 0) // (MARKS - 1)
            starts = [at + step * turn for turn in range(MARKS)] if step else [at]
            if number and pack.image is not None:
                if pack.until is not None:
                    pack.until(at + length)
                yield (index, number), length, b"".join(pack.image[begin : min(begin + MARK_BYTES, at + length)] for begin in starts)
            elif number:
                mark = b"".join(_piece(pack, edges, begin, min(MARK_BYTES, at + length - begin)) for begin in starts)
                yield (index, number), length, mark
            at += length


def _piece(pack: PackPlan, edges: Sequence[int], begin: int, length: int) -> bytes:
    """Bytes of one source, fewer if it ends there."""
    number = bisect_right(edges, begin) - 1
    source, start = pack.sources[number], begin - edges[number]
    into = bytearray(min(length, source.length - start))
    copy_from(source, start, memoryview(into))
    return bytes(into)


def _range(plan: PackPlan, at: int, length: int) -> memoryview:
    """So many bytes of a pack that is all there."""
    if plan.image is not None:
        return plan.image[at : at + length]
    into, begin, filled = memoryview(bytearray(length)), 0, 0
    for source in plan.sources:
        skip = at + filled - begin
        if skip < source.length and filled < length:
            step = min(length - filled, source.length - skip)
            copy_from(source, skip, into[filled : filled + step])
            filled += step
        begin += source.length
    return into


def _made(plan: PackPlan, coder: _Coder, pace: WriteLimits) -> Iterator[_Chunk]:
    """The chunks in order, each hashed, and coded if it is new. Small packs use no threads."""
    chunks = enumerate(_chunks(plan, coder.same, pace.spent))
    if plan.size <= INLINE_BYTES:
        yield from (coder.make(number, at, data) for number, (at, data) in chunks)
        return
    with ThreadPool(pace.threads, "relight-code") as pool:
        jobs: deque[Future[_Chunk]] = deque()
        try:
            for number, (at, data) in chunks:
                jobs.append(pool.submit(coder.make, number, at, data))
                if len(jobs) >= AHEAD:
                    yield jobs.popleft().result()
            while jobs:
                yield jobs.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # nobody reads the caller's memory any more


def _chunks(plan: PackPlan, without: Collection[int], spent: WriteStats) -> Iterator[tuple[int, memoryview]]:
    """Where each chunk begins, and its bytes, as they come; none of those ``without``, which are not read. ``spent``: is told how long
    they were waited for."""
    if plan.image is not None:
        at = there = 0
        for length in plan.chunks:
            if plan.until is not None and at + length > there:
                began = time.perf_counter()
                there = plan.until(at + length)
                spent.waited_s += time.perf_counter() - began
            yield at, plan.image[at : at + length]
            at += length
        return
    sources = iter(plan.sources)
    source, used, at = next(sources), 0, 0
    for number, length in enumerate(plan.chunks):
        left_out = number in without
        data, filled = _NO_BYTES if left_out else memoryview(bytearray(length)), 0
        while filled < length:
            if used == source.length:
                source, used = next(sources), 0
            step = min(length - filled, source.length - used)
            if not left_out:
                copy_from(source, used, data[filled : filled + step])
            filled, used = filled + step, used + step
        yield at, data
        at += length


class _Out:
    """The file of what is new: nothing, if there is nothing; of its very size, if that is little; else no longer than announced."""

    def __init__(self, store: ByteStore, key: str, at_most: int, spent: WriteStats) -> None:
        self._store, self._key, self._at_most, self._spent = store, key, at_most, spent
        self._writer: Writer | None = None
        self._buffer = page_buffer(min(HELD_BYTES, -(-at_most // PAGE) * PAGE))
        self._held = 0
        self._written = 0

    @property
    def size(self) -> int:
        """Of what was put here."""
        return self._written + self._held

    def spare(self, length: int) -> None:
        """So much of what was expected will not come."""
        self._at_most -= length

    def put(self, data: memoryview, expected: int) -> None:
        """Behind what is there."""
        self._at_most -= expected - len(data)
        while data:
            if self._held == len(self._buffer):
                self._flush()
            step = min(len(data), len(self._buffer) - self._held)
            self._buffer[self._held : self._held + step] = data[:step]
            self._held, data = self._held + step, data[step:]

    def finish(self) -> None:
        """Durable but for its name; there is no such file if nothing was put here."""
        if not self.size:
            return
        if self._writer is None:
            self._at_most = self.size
        self._flush()
        assert self._writer is not None
        self._writer.finish(self._written)

    def abort(self) -> None:
        """As if there had been none."""
        if self._writer is not None:
            self._writer.abort()

    def _flush(self) -> None:
        if self._writer is None:
            try:
                self._writer = self._store.write(self._key, self._at_most)
            except NoSpace:  # for all that may come, but perhaps for what will: it is asked for as it is written
                if self._at_most == self.size or encrypts(self._store):  # which writes no more than was announced
                    raise
                self._writer = self._store.write(self._key, self.size)
            self._writer = self._spent.timed(self._writer)
        self._writer.write_at(self._written, self._buffer[: -(-self._held // self._writer.align) * self._writer.align])
        self._written, self._held = self._written + self._held, 0
