"""Incremental packs: only new chunks are written, compressed if that makes them smaller.

The chunks of the attempt's last checkpoint are known by hash. A chunk that is already stored is referenced, not written. Other chunks are
coded (compressed or stored as a delta) if a sample shows a gain. A pack's own bytes go into one file, in the order of its chunks. A few
threads hash and code chunks ahead of the writer.
"""

from __future__ import annotations

import threading
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from relight.comm.new_threads import ThreadPool
from relight.commit.chunk_index import MARK_BYTES, MARKS, IncrementalState, IndexedChunk, KnownChunks, placed
from relight.commit.fp32_masters import Masters
from relight.commit.pack_writer import WriteLimits, WriteStats
from relight.commit.plan import PackPlan, SavePlan
from relight.commit.plugin_codecs import encode_with
from relight.errors import NoSpace
from relight.format import Digest, Tensor, dtype_named
from relight.format.chunk_codecs import (
    DELTAS,
    DERIVED,
    LOSSY,
    PLANES,
    RAW,
    ChunkCodec,
    EncodeContext,
    plugin,
)
from relight.format.chunk_locations import OWN, ChunkLocation, PackChunks
from relight.format.codecs import choose, encode, kind_of
from relight.format.entropy import Compress, compress, trial_of
from relight.format.lossy import RUNS_MAX, LossyRange
from relight.format.manifest import Pack, contents, tensors_in
from relight.format.names import stored_file
from relight.format.planes import Rooms
from relight.layout.sources import copy_from
from relight.policy.compact import (
    AUDIT_BYTES,
    EQUAL_MIN,
    Choice,
    CodecSample,
    Compact,
    bound_for,
    lossy_ways,
    plugin_for,
)
from relight.store import PAGE, ByteStore, Writer, page_buffer

HELD_BYTES = 16 << 20
"""Bytes buffered before a write. A pack with at most this many new bytes is announced to the store with its exact size."""
AHEAD = 8
"""Most chunks that are hashed and coded ahead of the writer."""
INLINE_BYTES = 1 << 20
SAMPLED, SAMPLED_BYTES = 6, 512 << 10
"""Number of chunk kinds with a sample that is coded to estimate the gain, and bytes of a sample. Small, as it runs during training,
before the save is reported."""
READ_MAX = 1.75
"""Most bytes that a reader must read for a chunk, with its delta chain, relative to the chunk's length. Limits the chain's length."""
_NO_BYTES = memoryview(b"")


class _CodingBuffers(threading.local):
    """The calling thread's buffers for coding."""

    def __init__(self) -> None:
        self.rooms = Rooms()


_OWN = _CodingBuffers()


class _Chunk(NamedTuple):
    """A chunk after hashing and coding."""

    hash: bytes
    where: IndexedChunk | None
    """Where it is already stored; None for a new chunk."""
    body: memoryview | bytes
    """Bytes to store for a new chunk."""
    codec: ChunkCodec
    base: IndexedChunk | None = None
    """Where the base of its delta is stored."""
    took_s: float = 0.0
    """Seconds spent on coding, including without gain."""


class _Coder(NamedTuple):
    """Hashes and codes the chunks of pack number ``place``. ``dtypes``, ``kinds``: first dtype, and dtype and role, by chunk number.

    Any thread.
    """

    dtypes: Sequence[str]
    kinds: Sequence[str]
    known: KnownChunks
    place: int
    coded: Collection[int]
    """Numbers of the chunks that are coded, if that makes them smaller."""
    spent: WriteStats
    """Records the time of hashing."""
    masters: Masters | None = None
    lossy: Mapping[int, list[LossyRange]] = {}
    """Ranges of chunks that may be stored lossily, by chunk number."""
    same: Mapping[int, tuple[bytes, IndexedChunk]] = {}
    """Hash and location of unchanged chunks, by chunk number. These are not read."""
    plugins: Mapping[int, ChunkCodec] = {}
    """Codecs that the settings name for chunks, by chunk number."""
    by: Compress = compress

    def make(self, number: int, offset: int, data: memoryview) -> _Chunk:
        """Hash and code chunk ``number``, which begins at byte ``offset`` of the pack."""
        if number in self.same:
            return _Chunk(*self.same[number], _NO_BYTES, RAW)
        context, chosen = self._context(number), self.plugins.get(number, RAW)
        for codec in (LOSSY, chosen):
            encoded = None if codec.exact else encode_with(codec, data, context)
            if encoded is not None and encoded.decoded is not None:
                value = Digest(encoded.decoded).digest()
                where = self.known.chunks.get((value, len(encoded.decoded)))
                stored, codec = (encoded.stored, codec) if where is None else (_NO_BYTES, RAW)
                return _Chunk(value, where, stored, codec)
        with self.spent.hashing():
            value = Digest(data).digest()
        where = self.known.chunks.get((value, len(data)))
        if where is not None:
            return _Chunk(value, where, _NO_BYTES, RAW)
        derived = DERIVED.encode(data, context)
        if derived is not None:
            return _Chunk(value, None, derived.stored, DERIVED)
        began = time.perf_counter()
        earlier = self.known.base(self.place, number, offset, len(data)) if number not in self.lossy else None
        context.base, base = earlier or (None, None)
        context.mostly_equal = number not in self.coded
        chunk = self._exact(data, value, context, base, chosen)
        return chunk if context.mostly_equal else chunk._replace(took_s=time.perf_counter() - began)

    def _exact(
        self, data: memoryview, value: bytes, context: EncodeContext, base: IndexedChunk | None, chosen: ChunkCodec
    ) -> _Chunk:
        """Return the chunk as the first exact codec that makes it smaller stores it; raw without one. ``base``: where its base is."""
        for codec in (chosen, DELTAS) if context.mostly_equal else (chosen, DELTAS, PLANES):
            encoded = encode_with(codec, data, context) if codec is not RAW and codec.exact else None
            if encoded is None or not len(encoded.stored) < len(data):
                continue
            if not codec.needs_base:
                return _Chunk(value, None, encoded.stored, codec)
            if self._is_acceptable_delta(base, len(encoded.stored), len(data)):
                return _Chunk(value, None, encoded.stored, codec, base)
        return _Chunk(value, None, data, RAW)

    def _context(self, number: int) -> EncodeContext:
        derive = partial(self.masters.derive, number) if self.masters is not None else None
        return EncodeContext(self.dtypes[number], self.by, _OWN.rooms, ranges=self.lossy.get(number, ()), derive=derive)

    def _is_acceptable_delta(self, where: IndexedChunk | None, stored: int, length: int) -> bool:
        """Return whether a delta to ``where`` keeps reads within ``READ_MAX``, and its base did not change in memory while it was coded."""
        before = self.known.before
        return (
            where is not None
            and stored + where.piece.reach <= READ_MAX * length
            and before is not None
            and before.still()
        )


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
    """Write the new chunks of all packs below ``prefix``, durably except for the names. Return the packs and the seconds of finishing.

    ``known``: stored chunks and bases of deltas. ``choice``: which new chunks are coded, if that makes them smaller. ``by``: compressor
    of planes.
    """
    written = [
        write_smaller(
            store,
            prefix,
            pack,
            _coder_of(pack, plan.tensors, index, known, choice, rules, pace.spent)._replace(by=by),
            pace,
        )
        for index, pack in enumerate(plan.packs)
    ]
    return [pack for pack, _ in written], sum(fsync_s for _, fsync_s in written)


def write_smaller(
    store: ByteStore, prefix: str, plan: PackPlan, coder: _Coder, pace: WriteLimits
) -> tuple[Pack, float]:
    """Write the new chunks of ``plan``. Return the pack for the part, and the seconds that finishing took.

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
                value = Digest(chunk.body).digest() if chunk.codec.code else chunk.hash
                base = None if chunk.base is None else placed(chunk.base, homes)
                code = chunk.codec.code if chunk.codec.code > 1 else bool(chunk.codec.code)
                pieces.append(ChunkLocation(OWN, out.size, len(chunk.body), code, value, base))
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
    plan: PackPlan,
    tensors: list[Tensor],
    index: int,
    known: KnownChunks,
    choice: Choice,
    rules: Compact,
    spent: WriteStats,
) -> _Coder:
    def exact(tensor: Tensor) -> bool:
        return not lossy_ways(rules, tensor.name, tensor.dtype)

    classes = [("uint8", "header"), *(of for of, _, _ in contents(plan.chunks, tensors, index))]
    kinds, dtypes = [_kind_name(of) for of in classes], [dtype for dtype, _ in classes]
    coded = [
        n for n, kind in enumerate(kinds) if choice.coded and (n == 0 or choice.kinds is None or kind in choice.kinds)
    ]
    masters = Masters(plan, tensors, index, exact) if choice.coded else None
    same = same_chunks(plan, tensors, index, known)
    return _Coder(
        dtypes, kinds, known, index, frozenset(coded), spent, masters, lossy_of(plan, tensors, index, rules), same,
        plugins_of(plan, tensors, index, rules),
    )  # fmt: skip


def _kind_name(of: tuple[str, str]) -> str:
    """Return dtype and role as one text."""
    return " ".join(of)


def same_chunks(
    plan: PackPlan, tensors: list[Tensor], index: int, known: KnownChunks
) -> dict[int, tuple[bytes, IndexedChunk]]:
    """Return hash and location of the chunks of pack ``index`` that have only unchanged tensors, by chunk number."""
    if not known.same:
        return {}
    same, unchanged_chunks = {id(tensors[number]) for number in known.same}, dict[int, tuple[bytes, IndexedChunk]]()
    for number, (_, parts) in enumerate(tensors_in(plan.chunks, tensors, index)):
        stored_chunk = known.there(index, number, plan.chunks[number])
        if stored_chunk is not None and parts and all(id(tensor) in same for tensor, _, _ in parts):
            unchanged_chunks[number] = stored_chunk
    return unchanged_chunks


def audited(smaller: IncrementalState, plan: SavePlan, known: KnownChunks, wrong: Callable[[str], None]) -> KnownChunks:
    """Hash some of the chunks that are declared unchanged, others each time, and return ``known``.

    If a chunk has changed, call ``wrong`` with the name of a tensor in it, and return ``known`` without unchanged tensors.
    Cost: hashing ``AUDIT_BYTES``.
    """
    chunks = [
        (index, pack, number, value)
        for index, pack in enumerate(plan.packs)
        for number, (value, where) in same_chunks(pack, plan.tensors, index, known).items()
        if where.piece.codec.exact
    ]
    left = AUDIT_BYTES
    for _ in range(len(chunks)):
        index, pack, number, value = chunks[smaller.audited % len(chunks)]
        smaller.audited += 1
        offset, length = sum(pack.chunks[:number]), pack.chunks[number]
        if Digest(_range(pack, offset, length)).digest() != value:
            wrong(
                next(
                    tensor.name
                    for tensor in plan.tensors
                    if tensor.pack == index
                    and tensor.offset < offset + length
                    and offset < tensor.offset + tensor.length
                )
            )
            return known._replace(same=frozenset())
        left -= length
        if left <= 0:
            break
    return known


def lossy_of(plan: PackPlan, tensors: list[Tensor], index: int, rules: Compact) -> dict[int, list[LossyRange]]:
    """Return the ranges of each chunk of pack ``index`` that may be stored lossily in part. A range is a tensor, or a piece of one."""
    if not rules.inexact:
        return {}
    lossy_chunks = dict[int, list[LossyRange]]()
    for number, (_, parts) in enumerate(tensors_in(plan.chunks, tensors, index)):
        runs = [_stretch(rules, tensor, end - begin) for tensor, begin, end in parts]
        if any(run.ways for run in runs) and len(runs) <= RUNS_MAX:
            lossy_chunks[number] = runs
    return lossy_chunks


def plugins_of(plan: PackPlan, tensors: list[Tensor], index: int, rules: Compact) -> dict[int, ChunkCodec]:
    """Return the codec of each chunk of pack ``index`` whose tensors' names all match patterns of one codec."""
    if not rules.plugin_codecs:
        return {}
    codecs = dict[int, ChunkCodec]()
    for number, (_, parts) in enumerate(tensors_in(plan.chunks, tensors, index)):
        chosen = {plugin_for(rules, tensor.name) for tensor, _, _ in parts}
        if len(chosen) == 1 and (name := chosen.pop()) is not None:
            codecs[number] = plugin(name)
    return codecs


def _stretch(rules: Compact, tensor: Tensor, length: int) -> LossyRange:
    """Return how ``length`` bytes of a tensor may be stored."""
    bound = bound_for(rules, tensor.name, tensor.dtype)
    ways = lossy_ways(rules, tensor.name, tensor.dtype)
    return LossyRange(length, ways) if bound is None else LossyRange(length, ways, bound.most, bound.relative)


class _Class(NamedTuple):
    """The chunks of one dtype and role that must be written, as ``(pack, offset, length)``, and how many bytes of them were derived."""

    chunks: list[tuple[PackPlan, int, int]]
    derived: int

    @property
    def bytes(self) -> int:
        """Bytes of all chunks."""
        return sum(length for _, _, length in self.chunks)


def sampled(plan: SavePlan, packs: Sequence[Pack], by: Compress = compress) -> list[CodecSample]:
    """Return gain and cost of coding a save like this, from a sample chunk of each of the largest kinds.

    ``packs``: how the save was stored. Reused and lossy chunks are left out, as they need no coding. Cost: coding ``SAMPLED`` times
    ``SAMPLED_BYTES``.
    """
    classes = _classes(plan, packs)
    whole = sum(kind_chunks.bytes for kind_chunks in classes.values())
    here = trial_of(by) is by
    clock = time.thread_time if here else time.perf_counter  # waiting for a device takes no processor time
    samples, rooms = [], Rooms()
    for of, kind_chunks in sorted(classes.items(), key=lambda entry: -entry[1].bytes)[:SAMPLED]:
        pack, offset, length = kind_chunks.chunks[len(kind_chunks.chunks) // 2]
        data = _range(pack, offset, min(length, SAMPLED_BYTES) if here else length)  # a device codes whole chunks
        began = clock()
        way = choose(data, kind_of(dtype_named(of[0])), None, trial_of(by))
        chosen = clock()
        body = None if way is None else encode(data, way, rooms=rooms, by=by)
        rate = (chosen - began) / length + (clock() - chosen) / len(data)
        share = (1.0 if body is None else len(body) / len(data)) * (1 - kind_chunks.derived / kind_chunks.bytes)
        samples.append(CodecSample(_kind_name(of), kind_chunks.bytes / whole, share, rate))
    return samples


def _classes(plan: SavePlan, packs: Sequence[Pack]) -> dict[tuple[str, str], _Class]:
    classes: dict[tuple[str, str], _Class] = {}
    for index, (pack, written) in enumerate(zip(plan.packs, packs, strict=True)):
        for number, (of, offset, length) in enumerate(contents(pack.chunks, plan.tensors, index), 1):
            piece = written.stored.pieces[number] if written.stored is not None else None
            if piece is None or (piece.home == OWN and piece.codec.exact):
                kind_chunks = classes.get(of) or _Class([], 0)
                kind_chunks.chunks.append((pack, offset, length))
                classes[of] = kind_chunks._replace(
                    derived=kind_chunks.derived + (length if piece is not None and not piece.codec.portable else 0)
                )
    return classes


ELEMENT_BYTES_MAX = 16
"""Bytes of the largest element; a multiple of every other one's."""


def marks_of(plan: SavePlan) -> dict[tuple[int, int], bytes]:
    """Return samples of every chunk except the packs' headers, by pack and number. Cost: a few reads of 16 bytes per chunk."""
    return {place: mark for place, _, mark in _marks(plan)}


def alike(plan: SavePlan, smaller: IncrementalState) -> float:
    """Return the share of the save that may equal an earlier one, by samples. Counting stops once the share reaches ``EQUAL_MIN``.

    Samples can miss a chunk that kept most of its bytes but none of the sampled ones. It is then stored again.
    """
    whole, alike_bytes = max(plan.logical_bytes, 1), 0
    for place, length, mark in _marks(plan):
        alike_bytes += length if smaller.may_be_there(place, mark) else 0
        if alike_bytes >= EQUAL_MIN * whole:
            break
    return alike_bytes / whole


def _marks(plan: SavePlan) -> Iterator[tuple[tuple[int, int], int, bytes]]:
    for index, pack in enumerate(plan.packs):
        edges = [0, *accumulate(source.length for source in pack.sources)] if pack.image is None else []
        offset = 0
        for number, length in enumerate(pack.chunks):
            step = max(length - MARK_BYTES, 0) // (MARKS - 1)
            starts = [offset + step * turn for turn in range(MARKS)] if step else [offset]
            if number and pack.image is not None:
                if pack.until is not None:
                    pack.until(offset + length)
                yield (
                    (index, number),
                    length,
                    b"".join(pack.image[begin : min(begin + MARK_BYTES, offset + length)] for begin in starts),
                )
            elif number:
                mark = b"".join(
                    _piece(pack, edges, begin, min(MARK_BYTES, offset + length - begin)) for begin in starts
                )
                yield (index, number), length, mark
            offset += length


def _piece(pack: PackPlan, edges: Sequence[int], begin: int, length: int) -> bytes:
    """Return ``length`` bytes from ``begin``, or fewer if their source ends before."""
    number = bisect_right(edges, begin) - 1
    source, start = pack.sources[number], begin - edges[number]
    end, first = min(start + length, source.length), start - start % ELEMENT_BYTES_MAX
    into = bytearray(min(-(-end // ELEMENT_BYTES_MAX) * ELEMENT_BYTES_MAX, source.length) - first)
    copy_from(source, first, memoryview(into))  # whole elements
    return bytes(into[start - first : end - first])


def _range(plan: PackPlan, offset: int, length: int) -> memoryview:
    """Return ``length`` bytes of a pack that is complete in memory."""
    if plan.image is not None:
        return plan.image[offset : offset + length]
    into, begin, filled = memoryview(bytearray(length)), 0, 0
    for source in plan.sources:
        skip = offset + filled - begin
        if skip < source.length and filled < length:
            step = min(length - filled, source.length - skip)
            copy_from(source, skip, into[filled : filled + step])
            filled += step
        begin += source.length
    return into


def _made(plan: PackPlan, coder: _Coder, pace: WriteLimits) -> Iterator[_Chunk]:
    """Yield the chunks in order, hashed, and coded if new. Small packs use no threads."""
    chunks = enumerate(_chunks(plan, coder.same, pace.spent))
    if plan.size <= INLINE_BYTES:
        yield from (coder.make(number, offset, data) for number, (offset, data) in chunks)
        return
    with ThreadPool(pace.threads, "relight-code") as pool:
        jobs: deque[Future[_Chunk]] = deque()
        try:
            for number, (offset, data) in chunks:
                jobs.append(pool.submit(coder.make, number, offset, data))
                if len(jobs) >= AHEAD:
                    yield jobs.popleft().result()
            while jobs:
                yield jobs.popleft().result()
        finally:
            pool.shutdown(wait=True, cancel_futures=True)  # no thread reads the caller's memory after this


def _chunks(plan: PackPlan, without: Collection[int], spent: WriteStats) -> Iterator[tuple[int, memoryview]]:
    """Yield offset and bytes of each chunk as it becomes available; no bytes for chunks in ``without``, which are not read.

    ``spent``: records the waiting time.
    """
    if plan.image is not None:
        offset = available = 0
        for length in plan.chunks:
            if plan.until is not None and offset + length > available:
                began = time.perf_counter()
                available = plan.until(offset + length)
                spent.waited_s += time.perf_counter() - began
            yield offset, plan.image[offset : offset + length]
            offset += length
        return
    sources = iter(plan.sources)
    source, used, offset = next(sources), 0, 0
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
        yield offset, data
        offset += length


class _Out:
    """File with a pack's new chunks, if any. Small files are announced with the exact size, others with an upper bound."""

    def __init__(self, store: ByteStore, key: str, at_most: int, spent: WriteStats) -> None:
        self._store, self._key, self._at_most, self._spent = store, key, at_most, spent
        self._writer: Writer | None = None
        self._buffer = page_buffer(min(HELD_BYTES, -(-at_most // PAGE) * PAGE))
        self._held = 0
        self._written = 0

    @property
    def size(self) -> int:
        """Bytes put so far."""
        return self._written + self._held

    def spare(self, length: int) -> None:
        """Reduce the expected size by ``length``."""
        self._at_most -= length

    def put(self, data: memoryview, expected: int) -> None:
        """Append ``data``. ``expected``: bytes that were announced for it."""
        self._at_most -= expected - len(data)
        while data:
            if self._held == len(self._buffer):
                self._flush()
            step = min(len(data), len(self._buffer) - self._held)
            self._buffer[self._held : self._held + step] = data[:step]
            self._held, data = self._held + step, data[step:]

    def finish(self) -> None:
        """Make the file durable except for its name. Without data, there is no file."""
        if not self.size:
            return
        if self._writer is None:
            self._at_most = self.size
        self._flush()
        assert self._writer is not None
        self._writer.finish(self._written)

    def abort(self) -> None:
        """Delete the file."""
        if self._writer is not None:
            self._writer.abort()

    def _flush(self) -> None:
        if self._writer is None:
            try:
                self._writer = self._store.write(self._key, self._at_most)
            # no space for the upper bound, but perhaps for the actual bytes: reserve space while they are written
            except NoSpace:
                # an encrypted file cannot exceed its announced size
                if self._at_most == self.size or self._store.properties().encrypted:
                    raise
                self._writer = self._store.write(self._key, self.size)
            self._writer = self._spent.timed(self._writer)
        self._writer.write_at(self._written, self._buffer[: -(-self._held // self._writer.align) * self._writer.align])
        self._written, self._held = self._written + self._held, 0
