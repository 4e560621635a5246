"""Reading tensors: in file order, hashed as they arrive, each byte read once.

What lies in the page cache goes from there straight to where it belongs. All else is read past the page cache into a few buffers: that is
what reaches the device's speed, run after run, and leaves to others the memory they cache with. Several threads read, so that the
device, or the network, always has something to do; others hash what was read, and move it on while the processor's cache still has it.
"""

from __future__ import annotations

import contextlib
import queue
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from itertools import zip_longest
from typing import NamedTuple

import msgspec

from relight.catalog.opened import Opened
from relight.catalog.packs import StoredReader, files_of, lies_at, open_pack
from relight.comm.new_threads import ThreadPool
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable
from relight.format import Digest, Part, Tensor
from relight.format.manifest import Pack
from relight.format.strict import shown
from relight.layout import Sink
from relight.layout.sources import HostMemorySink, address_of, copy_bytes, move, move_all
from relight.observe import emit
from relight.store import PAGE, ByteStore, Reader, page_buffer
from relight.store.base import READS_AT_ONCE, invalidate_cache, lanes_of
from relight.store.retry import report_reread

HASHERS = 2
READ_BYTES = 8 << 20
"""Chunks that follow one another are read together up to this size, by a few readers; up to the half of it by more than those."""
FEW = 4
AHEAD_MAX = 8
MANY = 32
"""So many tensors of one chunk are handed on together."""
INLINE_BYTES = 1 << 20
"""Below this, threads cost more than they save."""

Progress = Callable[[int], None]
Lend = Callable[["ChunkRange", memoryview], None]


class WantedChunk(NamedTuple):
    """One chunk to be read, and the tensors in it that are wanted: ``(tensor, sink)``."""

    chunk: int
    offset: int
    length: int
    hash: bytes
    takers: list[tuple[Tensor, Sink]]


Wants = dict[int, list[WantedChunk]]
"""Of a part: for each pack that is to be read, its chunks in order."""


class ChunkRange(NamedTuple):
    """Chunks that follow one another in a pack, read in one go."""

    offset: int
    length: int
    wants: list[WantedChunk]


class _OpenPack(NamedTuple):
    pack: Pack
    prefix: str
    reader: Reader
    """Closed, once all of the file is read."""
    store: ByteStore
    others: list[tuple[ByteStore, str]]
    """Where else it lies, nearest first: stores, and the checkpoint's directory in each."""
    told: list[str]
    """Where it was read from besides: told once each."""

    @property
    def key(self) -> str:
        """Its name in its own place."""
        return f"{self.prefix}/{self.pack.file}"

    def report_other_source(self, prefix: str, store: ByteStore) -> None:
        """Say that some of it was read from another place than its own."""
        if store.url not in self.told:
            self.told.append(store.url)
            what = f"{self.key} is damaged or gone in one tier; what was is read from {store.url}: relight scrub mends it"
            emit("restore.repaired", what, file=self.key, source=f"{store.url}/{prefix}/{self.pack.file}")


_Job = tuple[_OpenPack, ChunkRange]


def read_tensors(
    opened: Opened,
    part: Part,
    sinks: Mapping[int, Sink],
    *,
    readers: int | None = None,
    hashers: int = HASHERS,
    progress: Progress | None = None,
    rooms: list[memoryview] | None = None,
) -> int:
    """Fill ``sinks``, keyed by index into ``part.tensors``, and give the number of bytes read.

    Each chunk is read once and checked before anything is made of it, and once more if it is not what was committed;
    ``CorruptCheckpoint`` names file, chunk and tensors. Sinks may then hold bytes that are wrong or missing: they are to be filled again or
    thrown away. ``readers``: as many as the store has use for. Memory: ``readers + hashers + 1`` buffers of what is read at once, or of the
    longest chunk; ``rooms`` keeps them, for whoever reads again. ``progress`` is called in other threads, with the bytes of each chunk that
    was found right.
    """
    readers = opened.store.parallel_reads if readers is None else readers
    most = READ_BYTES if readers <= FEW else READ_BYTES // 2
    runs = {index: runs_of(wants, most) for index, wants in plan_wants(part, sinks).items()}
    return read_runs(opened, part, runs, readers=readers, hashers=hashers, progress=progress, rooms=rooms)


def read_runs(
    opened: Opened,
    part: Part,
    runs: Mapping[int, list[ChunkRange]],
    *,
    readers: int | None = None,
    hashers: int = HASHERS,
    progress: Progress | None = None,
    lend: Lend | None = None,
    rooms: list[memoryview] | None = None,
) -> int:
    """As ``read_tensors``, of what is planned for each pack. ``lend`` is called in other threads, with each run that was found right, and
    its bytes, valid until it returns."""
    readers = opened.store.parallel_reads if readers is None else readers
    plan = sorted(runs.items())
    total = sum(run.length for _, found in plan for run in found)
    longest = max((run.length for _, found in plan for run in found), default=0)
    if total <= INLINE_BYTES:
        readers = hashers = 0
    work = _Work(readers, hashers, longest, progress, lend, [] if rooms is None else rooms)
    try:
        lanes = lanes_of(opened.store)
        for start in range(0, len(plan), lanes):
            with contextlib.ExitStack() as files:
                work.read(_in_turn(opened, part, plan[start : start + lanes], files))
        work.finish()
    finally:
        work.stop()
    return total


def _in_turn(opened: Opened, part: Part, packs: Sequence[tuple[int, list[ChunkRange]]], files: contextlib.ExitStack) -> list[_Job]:
    """The runs of packs that lie on drives of their own, by turns, so that each drive has something to do; of one pack, in order."""
    rows: list[list[_Job]] = []
    for index, runs in packs:
        file = _open_pack(opened, part, index)
        files.callback(file.reader.close)
        rows.append([(file, run) for run in runs])
    return [job for turn in zip_longest(*rows) for job in turn if job is not None]


class _Work:
    """The threads, and the buffers between them."""

    def __init__(
        self, readers: int, hashers: int, longest: int, progress: Progress | None, lend: Lend | None, kept: list[memoryview]
    ) -> None:
        self._progress, self._lend, self._kept = progress, lend, kept
        self._threads = readers
        self._hashing: list[Future[None]] = []
        self._failed = False
        self._room_bytes = longest + 2 * PAGE
        self._rooms: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(readers + hashers + 1):
            there = kept and len(kept[-1]) >= self._room_bytes
            self._rooms.put(kept.pop() if there else None)  # made when it is needed
        if readers:
            self._readers = ThreadPool(readers, "relight-read")
            self._hashers = ThreadPool(hashers, "relight-hash")

    def read(self, jobs: list[_Job]) -> None:
        """Read all of it; what was read may still be waiting to be hashed."""
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
        """Wait until all of it is hashed and where it belongs. Raises what was found first."""
        for job in self._hashing:
            job.result()

    def stop(self) -> None:
        """End the threads; what has not begun never does."""
        self._failed = True
        if self._threads:
            self._readers.shutdown(wait=True)
            self._hashers.shutdown(wait=True)
        while not self._rooms.empty():
            room = self._rooms.get()
            if room is not None:
                self._kept.append(room)

    def _drain(self, queued: Iterator[_Job]) -> None:
        while not self._failed:
            job = next(queued, None)  # a list's iterator: one step at a time, whoever asks
            if job is None:
                return
            try:
                self._read(*job)
            except BaseException:
                self._failed = True
                raise

    def _read(self, file: _OpenPack, run: ChunkRange) -> None:
        room = self._rooms.get() or page_buffer(self._room_bytes)
        try:
            data = file.reader.fetch(run.offset, run.length, room)
            if data is not None and self._threads:  # the device goes on while others hash
                self._hashing.append(self._hashers.submit(self._verify_and_deliver, file, run, data, True, room))
                return
            if data is None:
                self._read_from_memory(file, run, room)
        except BaseException:
            self._rooms.put(room)
            raise
        if data is not None:
            self._verify_and_deliver(file, run, data, True, room)
        else:
            self._rooms.put(room)

    def _read_from_memory(self, file: _OpenPack, run: ChunkRange, room: memoryview) -> None:
        """Chunk by chunk, each straight to where it belongs if that is one place: whoever copied it has it in the processor's cache. Those
        who are lent the bytes want them in one piece."""
        pieces = [run] if self._lend else [ChunkRange(want.offset, want.length, [want]) for want in run.wants]
        for piece in pieces:
            target = _target(piece)
            data = room[: piece.length] if target is None else target
            _read_or_blank(file, piece, data)
            self._check(file, piece, data, data is not target)

    def _verify_and_deliver(self, file: _OpenPack, run: ChunkRange, data: memoryview, on_its_way: bool, room: memoryview) -> None:
        """Check what was read, and hand it on if it isn't where it belongs."""
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
            held = data[want.offset - run.offset :][: want.length]
            if Digest(held).digest() != want.hash:
                _once_more(file, held, want)
            if on_its_way:
                hand_on(held, want)
            if self._progress:
                self._progress(want.length)
        if self._lend:
            self._lend(run, data)


def each_chunk(
    reader: Reader, pack: Pack, key: str, at_once: int = READS_AT_ONCE, wanted: Callable[[int], bool] = lambda number: True
) -> Iterator[tuple[int, int, memoryview | RelightError]]:
    """Every chunk of a pack in order: its number, its offset, its bytes, valid until the next is asked for; or why there are none: it
    cannot be read, or is not what was committed, also when read once more. Those that are not ``wanted``, by their numbers, are left
    out, and not read. ``key`` is what the pack is called where it is told that some of it was read again.

    Threads read ahead, ``at_once`` or ``AHEAD_MAX``, and ``HASHERS`` others hash, while the caller is busy with what it got. Memory: a
    buffer of the longest chunk for each.
    """
    longest = max(length for length, _ in pack.chunks)
    if longest > reader.size:  # nothing is set aside for what cannot be there
        longest = reader.size
    rooms: deque[memoryview] = deque()
    places = ((number, offset, length) for number, offset, length in _places(pack) if wanted(number))
    at_once = min(at_once, AHEAD_MAX)

    def check(number: int, offset: int, data: memoryview) -> memoryview:
        if not _is_sound(reader, offset, data, pack.chunks[number][1], key):
            raise CorruptCheckpoint(f"is not what was committed{lies_at(reader, offset)}", where=key)
        return data

    with (
        ThreadPool(HASHERS, "relight-hash") as hashers,
        ThreadPool(at_once, "relight-read") as readers,
    ):

        def read(number: int, offset: int, length: int, room: memoryview) -> Future[memoryview]:
            if offset + length > reader.size:
                raise CorruptCheckpoint("the file ends sooner", where=key)
            data = reader.fetch(offset, length, room)
            if data is None:
                data = room[:length]
                reader.read_into(offset, data)
            return hashers.submit(check, number, offset, data)

        ahead: deque[tuple[int, int, memoryview, Future[Future[memoryview]]]] = deque()
        try:
            while True:
                while len(ahead) < at_once + HASHERS and (place := next(places, None)) is not None:
                    number, offset, length = place
                    room = rooms.popleft() if rooms else page_buffer(longest + 2 * PAGE)
                    ahead.append((number, offset, room, readers.submit(read, number, offset, length, room)))
                if not ahead:
                    return
                number, offset, room, job = ahead.popleft()
                try:
                    found: memoryview | RelightError = job.result().result()
                except RelightError as error:
                    found = error
                yield number, offset, found
                rooms.append(room)
        finally:
            readers.shutdown(wait=True, cancel_futures=True)
            hashers.shutdown(wait=True, cancel_futures=True)


def _places(pack: Pack) -> Iterator[tuple[int, int, int]]:
    offset = 0
    for number, (length, _) in enumerate(pack.chunks):
        yield number, offset, length
        offset += length


def check_pack(opened: Opened, part: Part, index: int) -> None:
    """``CorruptCheckpoint`` if that pack is missing, or not as long as was committed: to be asked before memory is made for its tensors."""
    _open_pack(opened, part, index).reader.close()


def plan_wants(part: Part, sinks: Mapping[int, Sink]) -> Wants:
    """The chunks that ``sinks``, keyed by index into ``part.tensors``, need."""
    wanted: list[list[tuple[Tensor, Sink]]] = [[] for _ in part.packs]
    for index, sink in sinks.items():
        tensor = part.tensors[index]
        skip = getattr(sink, "skip", None)
        if skip is not None:  # a run of it is enough
            tensor = msgspec.structs.replace(tensor, offset=tensor.offset + skip, length=sink.length)
        if sink.length != tensor.length:
            raise AssertionError(f"a sink of {sink.length} bytes for {tensor.name}, which has {tensor.length}")
        if tensor.length:
            wanted[tensor.pack].append((tensor, sink))
    return {index: _wants(part.packs[index], takers) for index, takers in enumerate(wanted) if takers}


def _wants(pack: Pack, takers: list[tuple[Tensor, Sink]]) -> list[WantedChunk]:
    order = sorted(range(len(takers)), key=[tensor.offset for tensor, _ in takers].__getitem__)
    takers = [takers[index] for index in order]
    offsets = [tensor.offset for tensor, _ in takers]
    wants: list[WantedChunk] = []
    start = first = 0
    for chunk, (length, value) in enumerate(pack.chunks):
        end = start + length
        behind = bisect_left(offsets, end, first)
        if behind > first:
            wants.append(WantedChunk(chunk, start, length, value, takers[first:behind]))
            tensor = takers[behind - 1][0]
            first = behind - 1 if tensor.offset + tensor.length > end else behind  # tensors do not overlap: only the last may go on
        start = end
    return wants


def runs_of(wants: list[WantedChunk], most: int = READ_BYTES // 2) -> list[ChunkRange]:
    """Chunks, in order, as what is read in one go, ``most`` bytes if they are several."""
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
    """That pack, open, in the nearest place that has it. ``CorruptCheckpoint`` if it is missing in all, or not as long as was committed."""
    pack = part.packs[index]
    places = [(opened.store, opened.prefix), *opened.spares]
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
                if number:
                    file._replace(prefix=places[0][1]).report_other_source(prefix, store)
                return file
            reader.close()
            problem = problem or CorruptCheckpoint(f"{reader.size} bytes long, {pack.size} were committed", where=where)
    assert problem is not None
    raise problem


def _read_or_blank(file: _OpenPack, run: ChunkRange, into: memoryview) -> None:
    """Fill ``into``. Bytes that cannot be made out here may be elsewhere: where they are looked for, is known by their hashes."""
    try:
        file.reader.read_into(run.offset, into)
    except CorruptCheckpoint:
        if not file.others:
            raise
        into[:] = bytes(len(into))


def _target(run: ChunkRange) -> memoryview | None:
    """Where the run may be read to at once: a single chunk that is all one tensor's."""
    if len(run.wants) != 1 or len(run.wants[0].takers) != 1:
        return None
    tensor, sink = run.wants[0].takers[0]
    start = run.offset - tensor.offset
    view = sink.view()
    if view is None or start < 0 or start + run.length > tensor.length:
        return None
    return view[start : start + run.length]


def hand_on(held: memoryview, want: WantedChunk) -> None:
    """Give a chunk's bytes, which were checked, to the sinks that want some of them."""
    start, stop, source = want.offset, want.offset + want.length, address_of(held)
    takers = want.takers
    if len(takers) >= MANY and source and {type(sink) for _, sink in takers} == {HostMemorySink}:
        inner = takers[1:-1]  # all of these lie within: only the first and the last may go on beyond
        places = [sink.address for _, sink in inner if isinstance(sink, HostMemorySink)]
        move_all(places, [source - start + tensor.offset for tensor, _ in inner], [tensor.length for tensor, _ in inner])
        takers = [takers[0], takers[-1]]
    for tensor, sink in takers:
        offset, length = tensor.offset, tensor.length
        if isinstance(sink, HostMemorySink) and source and start <= offset and offset + length <= stop:
            move(sink.address, source + offset - start, length)
            continue
        begin, end = max(start, offset), min(stop, offset + length)
        data = held[begin - start : end - start]
        view = sink.view()
        if view is not None:
            copy_bytes(data, view[begin - offset : end - offset])
        else:
            sink.absorb(begin - offset, data)


def _once_more(file: _OpenPack, held: memoryview, want: WantedChunk) -> None:
    """Read a chunk that is not what was committed once more: it may have been damaged on its way; then from where else it lies.
    ``CorruptCheckpoint`` if it is nowhere what was committed."""
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
                    reader.read_into(want.offset, held)
                finally:
                    reader.close()
                if Digest(held).digest() == want.hash:
                    if store is file.store:
                        report_reread(file.key)
                    else:
                        file.report_other_source(prefix, store)
                    return
    check_chunk(held, want, file.key, lies_at(file.reader, want.offset))


def _is_sound(reader: Reader, offset: int, piece: memoryview, value: bytes, key: str) -> bool:
    """Whether a chunk is what was committed; if not, it is read once more, to where it lies."""
    if Digest(piece).digest() == value:
        return True
    with contextlib.suppress(RelightError):
        reader.read_into(offset, piece)
    if Digest(piece).digest() != value:
        return False
    report_reread(key)
    return True


def check_chunk(data: memoryview, want: WantedChunk, key: str, besides: str = "") -> None:
    """``CorruptCheckpoint``, which names the tensors, if a chunk is not what was committed."""
    if Digest(data).digest() != want.hash:
        names = [shown(tensor.name) for tensor, _ in want.takers[:3]]
        held = ", ".join(names) + (f" and {len(want.takers) - 3} more" if len(want.takers) > 3 else "")
        raise CorruptCheckpoint(
            f"chunk {want.chunk} (bytes {want.offset}–{want.offset + want.length}) is not what was committed; it holds {held}{besides}",
            where=key,
        )
