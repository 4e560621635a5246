"""Read tensors: in file order, hashed as they arrive, each byte read once.

Bytes in the page cache are copied from there straight to their sinks. Other bytes are read with direct I/O into a few buffers: that reaches
the device's speed in every run, and leaves the page cache to other processes. Several threads read, so that the device or network is always
busy. Other threads hash what was read, and copy it to the sinks while it is in the CPU cache.
"""

from __future__ import annotations

import contextlib
import os
import queue
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from relight.comm.new_threads import ThreadPool
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, no_memory
from relight.format import Digest, Part, Tensor
from relight.format.manifest import Pack
from relight.format.strict import shown
from relight.layout import RangeSink, Sink
from relight.layout.sources import HostMemorySink, LandingSink, address_of, copy_bytes, move, move_all
from relight.observe import emit
from relight.reader.opened import Opened
from relight.reader.pack_reader import StoredReader, files_of, location_text, open_pack
from relight.store import PAGE, ByteStore, Reader, page_buffer
from relight.store.base import READS_AT_ONCE, invalidate_cache
from relight.store.retry import report_reread
from relight.units import size_text

_THREADS_MIN, _THREADS_MAX = 2, 8
READ_BYTES = 8 << 20
"""Largest number of bytes of adjacent chunks in one read, with up to ``FEW`` readers. With more readers, half of it."""
FEW = 4
AHEAD_MAX = 8
MANY = 32
"""Number of tensors in one chunk from which they are copied in one call."""
INLINE_BYTES = 1 << 20
"""Below this, threads cost more than they save."""

Progress = Callable[[int], None]
Lend = Callable[["ChunkRange", memoryview], None]


class WantedChunk(NamedTuple):
    """A chunk to read, and the wanted tensors in it: ``(tensor, sink)``."""

    chunk: int
    offset: int
    length: int
    hash: bytes
    takers: list[tuple[Tensor, Sink]]


Wants = dict[int, list[WantedChunk]]
"""The chunks to read of a part, in order, by the pack's index."""


class ChunkRange(NamedTuple):
    """Adjacent chunks of a pack, read at once."""

    offset: int
    length: int
    wants: list[WantedChunk]


class _OpenPack(NamedTuple):
    pack: Pack
    prefix: str
    reader: Reader
    """The caller closes it after all of the file was read."""
    store: ByteStore
    others: list[tuple[ByteStore, str]]
    """Other copies, nearest first: the store, and the checkpoint's directory there."""
    reported: list[str]
    """URLs of other stores that it was read from. Each is reported once."""

    @property
    def key(self) -> str:
        """Return its key in ``store``."""
        return f"{self.prefix}/{self.pack.file}"

    def report_other_source(self, prefix: str, store: ByteStore) -> None:
        """Emit, once per store, that some of the pack was read from another store."""
        if store.url not in self.reported:
            self.reported.append(store.url)
            message = f"{self.key} is damaged or gone in one tier; it is read from {store.url} instead: relight verify --repair repairs it"
            emit("restore.repaired", message, file=self.key, source=f"{store.url}/{prefix}/{self.pack.file}")


_Job = tuple[_OpenPack, ChunkRange]


def cpu_threads() -> int:
    """Return how many threads of this rank hash or copy at once: half of its share of the node's cores, from 2 to 8."""
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0)) // max(1, int(ranks) if ranks.isdecimal() else 1)
    return min(max(cores // 2, _THREADS_MIN), _THREADS_MAX)


def read_tensors(
    opened: Opened,
    part: Part,
    sinks: Mapping[int, Sink],
    *,
    readers: int | None = None,
    hashers: int | None = None,
    progress: Progress | None = None,
    rooms: list[memoryview] | None = None,
) -> int:
    """Fill ``sinks``, keyed by index into ``part.tensors``. Return the number of bytes read.

    Each chunk is read once and verified before use; a chunk that fails is read again. ``CorruptCheckpoint`` names file, chunk and tensors.
    Sinks may then hold wrong or missing bytes: the caller must fill them again or discard them. ``readers``: number of reading threads;
    None: the store's number of parallel reads. ``hashers``: of hashing threads; None: ``cpu_threads``. Memory: ``readers + hashers + 1``
    buffers of the largest read. ``rooms`` keeps the buffers for the next call. ``progress`` is called in other threads, with the bytes of
    each verified chunk.
    """
    readers = opened.store.properties().parallel_reads if readers is None else readers
    most = READ_BYTES if readers <= FEW else READ_BYTES // 2
    runs = {index: runs_of(wants, most) for index, wants in plan_wants(part, sinks).items()}
    return read_runs(opened, part, runs, readers=readers, hashers=hashers, progress=progress, rooms=rooms)


def read_runs(
    opened: Opened,
    part: Part,
    runs: Mapping[int, list[ChunkRange]],
    *,
    readers: int | None = None,
    hashers: int | None = None,
    progress: Progress | None = None,
    lend: Lend | None = None,
    rooms: list[memoryview] | None = None,
) -> int:
    """Read the planned ranges of each pack, like ``read_tensors``.

    ``lend`` is called in other threads, with each verified range and its bytes, which are valid until it returns.
    """
    readers = opened.store.properties().parallel_reads if readers is None else readers
    plan = sorted(runs.items())
    total = sum(run.length for _, ranges in plan for run in ranges)
    longest = max((run.length for _, ranges in plan for run in ranges), default=0)
    hashers = cpu_threads() if hashers is None else hashers
    if total <= INLINE_BYTES:
        readers = hashers = 0
    work = _Work(readers, hashers, longest, progress, lend, [] if rooms is None else rooms)
    try:
        lanes = opened.store.properties().lanes
        for start in range(0, len(plan), lanes):
            with contextlib.ExitStack() as files:
                work.read(_in_turn(opened, part, plan[start : start + lanes], files))
        work.finish()
    finally:
        work.stop()
    return total


def _in_turn(
    opened: Opened, part: Part, packs: Sequence[tuple[int, list[ChunkRange]]], files: contextlib.ExitStack
) -> list[_Job]:
    """Interleave the ranges of packs on different drives, so that each drive is busy. Ranges of one pack stay in order."""
    rows: list[list[_Job]] = []
    for index, runs in packs:
        file = _open_pack(opened, part, index)
        files.callback(file.reader.close)
        rows.append([(file, run) for run in runs])
    return [job for turn in zip_longest(*rows) for job in turn if job is not None]


class _Work:
    """Reading and hashing threads, and the buffers between them."""

    def __init__(
        self,
        readers: int,
        hashers: int,
        longest: int,
        progress: Progress | None,
        lend: Lend | None,
        kept: list[memoryview],
    ) -> None:
        self._progress, self._lend, self._kept = progress, lend, kept
        self._threads = readers
        self._hashing: list[Future[None]] = []
        self._failed = False
        self._room_bytes = longest + 2 * PAGE
        self._rooms: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(readers + hashers + 1):
            reusable = kept and len(kept[-1]) >= self._room_bytes
            self._rooms.put(kept.pop() if reusable else None)  # None: allocated on first use
        if readers:
            self._readers = ThreadPool(readers, "relight-read")
            self._hashers = ThreadPool(hashers, "relight-hash")

    def read(self, jobs: list[_Job]) -> None:
        """Read all jobs. Some of the bytes may still wait for hashing on return."""
        if not self._threads:
            for file, run in jobs:
                self._read(file, run)
            return
        queued = iter(jobs)
        pending = [self._readers.submit(self._drain, queued) for _ in range(self._threads)]
        for reading in pending:
            reading.result()
        if self._failed:
            self.finish()

    def finish(self) -> None:
        """Wait until everything is hashed and in its sinks. Raise the first error."""
        for job in self._hashing:
            job.result()

    def stop(self) -> None:
        """End the threads. Jobs that have not begun are dropped."""
        self._failed = True
        if self._threads:
            self._readers.shutdown(wait=True)
            self._hashers.shutdown(wait=True)
        while not self._rooms.empty():
            buffer = self._rooms.get()
            if buffer is not None:
                self._kept.append(buffer)

    def _drain(self, queued: Iterator[_Job]) -> None:
        while not self._failed:
            job = next(queued, None)  # thread-safe: next() of a list's iterator is atomic
            if job is None:
                return
            try:
                self._read(*job)
            except BaseException:
                self._failed = True
                raise

    def _read(self, file: _OpenPack, run: ChunkRange) -> None:
        try:
            buffer = self._rooms.get() or page_buffer(self._room_bytes)
        except (MemoryError, OSError) as error:
            names = ", ".join(
                dict.fromkeys(shown(tensor.name) for want in run.wants[:3] for tensor, _ in want.takers[:1])
            )
            raise no_memory(error, f"a buffer of {size_text(self._room_bytes)} to read {names}", file.key) from error
        try:
            data = file.reader.fetch(run.offset, run.length, buffer)
            if data is not None and self._threads:  # the device keeps reading while other threads hash
                self._hashing.append(self._hashers.submit(self._verify_and_deliver, file, run, data, True, buffer))
                return
            if data is None:
                self._read_from_memory(file, run, buffer)
        except BaseException:
            self._rooms.put(buffer)
            raise
        if data is not None:
            self._verify_and_deliver(file, run, data, True, buffer)
        else:
            self._rooms.put(buffer)

    def _read_from_memory(self, file: _OpenPack, run: ChunkRange, room: memoryview) -> None:
        """Copy from the page cache chunk by chunk, each straight to its sink, or to where its sink takes it from: hashing then
        finds it in the CPU cache.

        Lending needs the range in one piece.
        """
        pieces = [run] if self._lend else [ChunkRange(want.offset, want.length, [want]) for want in run.wants]
        for piece in pieces:
            target, is_sinks = _target(piece)
            data = room[: piece.length] if target is None else target
            _read_or_blank(file, piece, data)
            self._check(file, piece, data, not is_sinks)

    def _verify_and_deliver(
        self, file: _OpenPack, run: ChunkRange, data: memoryview, on_its_way: bool, room: memoryview
    ) -> None:
        """Verify the bytes, copy them to their sinks if they are not there yet, and return the buffer."""
        try:
            if not self._failed:
                self._check(file, run, data, on_its_way)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._rooms.put(room)

    def _check(self, file: _OpenPack, run: ChunkRange, data: memoryview, on_its_way: bool) -> None:
        for want in run.wants:
            chunk = data[want.offset - run.offset :][: want.length]
            if Digest(chunk).digest() != want.hash:
                _once_more(file, chunk, want)
            if on_its_way:
                deliver_chunk(chunk, want)
            if self._progress:
                self._progress(want.length)
        if self._lend:
            self._lend(run, data)


def each_chunk(
    reader: Reader,
    pack: Pack,
    key: str,
    at_once: int = READS_AT_ONCE,
    wanted: Callable[[int], bool] = lambda number: True,
) -> Iterator[tuple[int, int, memoryview | RelightError]]:
    """Yield the number, offset and bytes of each chunk of a pack, in order. The bytes are valid until the next chunk is requested.

    If a chunk cannot be read, or is not what was committed even when read again, the error is yielded instead of the bytes. Chunks that
    are not ``wanted``, by number, are skipped and not read. ``key``: the pack's name in errors and events.

    ``at_once`` threads, at most ``AHEAD_MAX``, read ahead, and ``cpu_threads()`` others hash, while the caller works on what it got.
    Memory: a buffer of the longest chunk for each.
    """
    longest = max(length for length, _ in pack.chunks)
    if longest > reader.size:  # allocate no memory for bytes that cannot exist
        longest = reader.size
    rooms: deque[memoryview] = deque()
    places = ((number, offset, length) for number, offset, length in _places(pack) if wanted(number))
    at_once, hashing = min(at_once, AHEAD_MAX), cpu_threads()

    def check(number: int, offset: int, data: memoryview) -> memoryview:
        if not _is_sound(reader, offset, data, pack.chunks[number][1], key):
            raise CorruptCheckpoint(f"is not what was committed{location_text(reader, offset)}", where=key)
        return data

    with (
        ThreadPool(hashing, "relight-hash") as hashers,
        ThreadPool(at_once, "relight-read") as readers,
    ):

        def read(number: int, offset: int, length: int, buffer: memoryview) -> Future[memoryview]:
            if offset + length > reader.size:
                raise CorruptCheckpoint("the file is truncated", where=key)
            data = reader.fetch(offset, length, buffer)
            if data is None:
                data = buffer[:length]
                reader.read_into(offset, data)
            return hashers.submit(check, number, offset, data)

        ahead: deque[tuple[int, int, memoryview, Future[Future[memoryview]]]] = deque()
        try:
            while True:
                while len(ahead) < at_once + hashing and (place := next(places, None)) is not None:
                    number, offset, length = place
                    buffer = rooms.popleft() if rooms else page_buffer(longest + 2 * PAGE)
                    ahead.append((number, offset, buffer, readers.submit(read, number, offset, length, buffer)))
                if not ahead:
                    return
                number, offset, buffer, job = ahead.popleft()
                try:
                    outcome: memoryview | RelightError = job.result().result()
                except RelightError as error:
                    outcome = error
                yield number, offset, outcome
                rooms.append(buffer)
        finally:
            readers.shutdown(wait=True, cancel_futures=True)
            hashers.shutdown(wait=True, cancel_futures=True)


def _places(pack: Pack) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for number, (length, _) in enumerate(pack.chunks):
        yield number, offset, length
        offset += length


def check_pack(opened: Opened, part: Part, index: int) -> None:
    """Raise ``CorruptCheckpoint`` if a pack is missing or has the wrong length. Call it before allocating memory for its tensors."""
    _open_pack(opened, part, index).reader.close()


def plan_wants(part: Part, sinks: Mapping[int, Sink]) -> Wants:
    """Return the chunks that ``sinks``, keyed by index into ``part.tensors``, need."""
    wanted: list[list[tuple[Tensor, Sink]]] = [[] for _ in part.packs]
    for index, sink in sinks.items():
        tensor = part.tensors[index]
        if isinstance(sink, RangeSink):
            tensor = msgspec.structs.replace(tensor, offset=tensor.offset + sink.skip, length=sink.length)
        if sink.length != tensor.length:
            raise AssertionError(f"a sink of {sink.length} bytes for {tensor.name}, which has {tensor.length}")
        if tensor.length:
            wanted[tensor.pack].append((tensor, sink))
    return {index: _wants(part.packs[index], takers) for index, takers in enumerate(wanted) if takers}


def _wants(pack: Pack, takers: list[tuple[Tensor, Sink]]) -> list[WantedChunk]:
    offsets = [tensor.offset for tensor, _ in takers]
    if offsets != sorted(offsets):
        order = sorted(range(len(takers)), key=offsets.__getitem__)
        takers = [takers[index] for index in order]
        offsets = [offsets[index] for index in order]
    are_ranges = any(issubclass(kind, RangeSink) for kind in {type(sink) for _, sink in takers})
    wants: list[WantedChunk] = []
    start = first = 0
    for chunk, (length, value) in enumerate(pack.chunks):
        end = start + length
        after = bisect_left(offsets, end, first)
        if after > first:
            here = takers[first:after]
            if are_ranges:
                here = [taker for taker in here if _takes(*taker, start, end)]
            if here:
                wants.append(WantedChunk(chunk, start, length, value, here))
            tensor = takers[after - 1][0]
            # tensors do not overlap: only the last may continue
            first = after - 1 if tensor.offset + tensor.length > end else after
        start = end
    return wants


def _takes(tensor: Tensor, sink: Sink, start: int, end: int) -> bool:
    """Return whether the sink of ``tensor`` needs the pack's bytes ``start`` to ``end``."""
    if not isinstance(sink, RangeSink):
        return True
    return sink.needs(max(start - tensor.offset, 0), min(end - tensor.offset, tensor.length))


def runs_of(wants: list[WantedChunk], most: int = READ_BYTES // 2) -> list[ChunkRange]:
    """Join adjacent chunks to ranges of at most ``most`` bytes. A longer chunk is a range of its own."""
    runs: list[ChunkRange] = []
    for want in wants:
        last = runs[-1] if runs else None
        if last and last.offset + last.length == want.offset and last.length + want.length <= most:
            last.wants.append(want)
            runs[-1] = last._replace(length=last.length + want.length)
        else:
            runs.append(ChunkRange(want.offset, want.length, [want]))
    return runs


def _open_pack(opened: Opened, part: Part, index: int) -> _OpenPack:
    """Open a pack in the nearest store that has it whole. Raise the first error if no store has it in its committed length."""
    pack = part.packs[index]
    own = (opened.store, opened.prefix)
    is_plain = pack.stored is None  # else each copy may store the chunks in another way
    places = [*opened.nearer, own, *opened.spares] if is_plain else [own, *opened.nearer, *opened.spares]
    first = len(opened.nearer) if is_plain else 0
    problem: RelightError | None = None
    for number, (store, prefix) in enumerate(places):
        where = f"{prefix}/{pack.file}"
        try:
            reader = open_pack(store, prefix, pack)
        except CheckpointNotFound:
            problem = problem or CorruptCheckpoint("a file of this checkpoint is missing", where=where)
        except (CorruptCheckpoint, StoreUnavailable) as error:
            problem = problem or error
        else:
            if reader.size == pack.size:
                file = _OpenPack(pack, prefix, reader, store, [*places[:number], *places[number + 1 :]], [])
                if number > first:
                    file._replace(prefix=opened.prefix).report_other_source(prefix, store)
                return file
            reader.close()
            problem = problem or CorruptCheckpoint(f"{reader.size} bytes long, {pack.size} were committed", where=where)
    assert problem is not None
    raise problem


def _read_or_blank(file: _OpenPack, run: ChunkRange, into: memoryview) -> None:
    """Fill ``into``. If the bytes are unreadable and there are other copies, fill zeros: the failing hash makes the caller try those."""
    try:
        file.reader.read_into(run.offset, into)
    except CorruptCheckpoint:
        if not file.others:
            raise
        into[:] = bytes(len(into))


def _target(run: ChunkRange) -> tuple[memoryview | None, bool]:
    """Return memory of the sink, if the range is a single chunk within one tensor, and whether it is the sink's final memory.

    None: the sink offers none, or there are several.
    """
    if len(run.wants) != 1 or len(run.wants[0].takers) != 1:
        return None, False
    tensor, sink = run.wants[0].takers[0]
    start = run.offset - tensor.offset
    if start < 0 or start + run.length > tensor.length:
        return None, False
    view = sink.view()
    if view is not None:
        return view[start : start + run.length], True
    return (sink.landing(start, run.length) if isinstance(sink, LandingSink) else None), False


def deliver_chunk(chunk: memoryview, want: WantedChunk) -> None:
    """Copy a chunk's verified bytes to the sinks that want some of them."""
    start, stop, source = want.offset, want.offset + want.length, address_of(chunk)
    takers = want.takers
    if len(takers) >= MANY and source and {type(sink) for _, sink in takers} == {HostMemorySink}:
        inner = takers[1:-1]  # these are wholly inside the chunk; only the first and the last may extend beyond it
        places = [sink.address for _, sink in inner if isinstance(sink, HostMemorySink)]
        move_all(
            places, [source - start + tensor.offset for tensor, _ in inner], [tensor.length for tensor, _ in inner]
        )
        takers = [takers[0], takers[-1]]
    for tensor, sink in takers:
        offset, length = tensor.offset, tensor.length
        if isinstance(sink, HostMemorySink) and source and start <= offset and offset + length <= stop:
            move(sink.address, source + offset - start, length)
            continue
        begin, end = max(start, offset), min(stop, offset + length)
        data = chunk[begin - start : end - start]
        view = sink.view()
        if view is not None:
            copy_bytes(data, view[begin - offset : end - offset])
        else:
            sink.absorb(begin - offset, data)


def _once_more(file: _OpenPack, chunk: memoryview, want: WantedChunk) -> None:
    """Read a bad chunk again, as it may have been damaged in transit, then from the other copies.

    Raise ``CorruptCheckpoint`` if no copy is what was committed.
    """
    for store, prefix in ((file.store, file.prefix), *file.others):
        with contextlib.suppress(RelightError):
            if file.pack.stored is None:
                invalidate_cache(store, f"{prefix}/{file.pack.file}", want.offset, want.length)
            else:
                for key in files_of(prefix, file.pack):
                    invalidate_cache(store, key)
            for open_it in (open_pack, StoredReader) if file.pack.stored is not None else (open_pack,):
                reader: Reader = open_it(store, prefix, file.pack)
                try:
                    reader.read_into(want.offset, chunk)
                finally:
                    reader.close()
                if Digest(chunk).digest() == want.hash:
                    if store is file.store:
                        report_reread(file.key)
                    else:
                        file.report_other_source(prefix, store)
                    return
    check_chunk(chunk, want, file.key, location_text(file.reader, want.offset))


def _is_sound(reader: Reader, offset: int, piece: memoryview, value: bytes, key: str) -> bool:
    """Return whether a chunk is what was committed. If it is not, it is read once more into ``piece``."""
    if Digest(piece).digest() == value:
        return True
    with contextlib.suppress(RelightError):
        reader.read_into(offset, piece)
    if Digest(piece).digest() != value:
        return False
    report_reread(key)
    return True


def check_chunk(data: memoryview, want: WantedChunk, key: str, suffix: str = "") -> None:
    """Raise ``CorruptCheckpoint``, with the names of the tensors, if a chunk is not what was committed."""
    if Digest(data).digest() != want.hash:
        names = [shown(tensor.name) for tensor, _ in want.takers[:3]]
        affected = ", ".join(names) + (f" and {len(want.takers) - 3} more" if len(want.takers) > 3 else "")
        raise CorruptCheckpoint(
            f"chunk {want.chunk} (bytes {want.offset}–{want.offset + want.length}) is not what was committed; it holds {affected}{suffix}",
            where=key,
        )
