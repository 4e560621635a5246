"""Stream a pack to the store: copy, hash the copy, and write it, with bounded memory and without the disk waiting for the hash.

Two slabs of page-aligned memory alternate: while one is written, a few threads fill and hash the other. The hash always matches the
written bytes, even if the source changes meanwhile.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from relight.comm import lower_after
from relight.comm.new_threads import ThreadPool
from relight.commit.plan import PackPlan
from relight.errors import SaveFailed
from relight.format import Digest
from relight.layout import Source
from relight.layout.sources import copy_from
from relight.store import PAGE, Writer, page_buffer

SLAB_BYTES = 16 << 20
THREADS = 2
WRITES_AT_ONCE = 2
"""Parallel writes, so that the device is busy while a waiting thread wakes up."""
HASHERS_NICE = 5
"""Added niceness of hashing threads, so that the device does not wait for them."""
_AHEAD = 16
"""Most chunks hashed ahead of the writer: enough to keep the threads busy, few enough to stop soon."""


class WriteStats:
    """Times and bytes of a save.

    ``bytes``, ``seconds``: written bytes, and seconds in which the store was busy; parallel writes count once. Any thread.
    ``hashing_s``, ``hashing_own_s``: wall and CPU seconds of hashing, summed over threads. Any thread.
    ``coded``: bytes and seconds, summed over threads, by kind. ``waited_s``: seconds waited for data. Only the packs' writer thread.
    """

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0
        self.hashing_s = self.hashing_own_s = 0.0
        self.coded: dict[str, tuple[int, float]] = {}
        self.waited_s = 0.0
        self._lock, self._under_way, self._since = threading.Lock(), 0, 0.0

    def add_coded(self, kind: str, length: int, seconds: float) -> None:
        """Add ``length`` bytes that were coded, including without gain."""
        so_far, took = self.coded.get(kind, (0, 0.0))
        self.coded[kind] = so_far + length, took + seconds

    @contextlib.contextmanager
    def counted(self, length: int) -> Iterator[None]:
        """Count the time in which the store writes ``length`` bytes."""
        with self._lock:
            if not self._under_way:
                self._since = time.perf_counter()
            self._under_way += 1
        try:
            yield
        finally:
            with self._lock:
                self.bytes, self._under_way = self.bytes + length, self._under_way - 1
                if not self._under_way:
                    self.seconds += time.perf_counter() - self._since

    def timed(self, writer: Writer) -> Writer:
        """Return ``writer`` with its bytes and times added here."""
        return _Timed(writer, self)

    @contextlib.contextmanager
    def hashing(self) -> Iterator[None]:
        """Count wall and CPU time of hashing in memory, which waits only for a CPU."""
        began, had = time.perf_counter(), time.thread_time()
        yield
        own_s, took_s = time.thread_time() - had, time.perf_counter() - began
        with self._lock:
            self.hashing_s, self.hashing_own_s = self.hashing_s + took_s, self.hashing_own_s + own_s


class _Timed:
    def __init__(self, inner: Writer, spent: WriteStats) -> None:
        self._inner, self._spent, self.align = inner, spent, inner.align

    def write_at(self, offset: int, data: memoryview) -> None:
        with self._spent.counted(len(data)):
            self._inner.write_at(offset, data)

    def finish(self, size: int | None = None) -> None:
        with self._spent.counted(0):
            self._inner.finish(size)

    def abort(self) -> None:
        self._inner.abort()


@dataclass(frozen=True, slots=True)
class WriteLimits:
    """Limits of writing a pack: hashing threads, and bytes per second (None: unlimited)."""

    threads: int = THREADS
    bytes_per_second: float | None = None
    """Bandwidth limit that ``PacedStore`` enforces. A save uses it to decide whether coding pays."""
    progress: Callable[[int], None] | None = None
    """Called repeatedly with the number of bytes written since the last call."""
    spent: WriteStats = field(default_factory=WriteStats)
    """Records times and bytes of the save."""


class _SlabPiece(NamedTuple):
    """The range of one chunk in one slab: filled and hashed by one thread."""

    chunk: int
    start: int
    """Offset in the slab."""
    spans: list[tuple[Source, int, int]]
    """``(source, start in the source, length)``, back to back."""


def write_pack(
    writer: Writer,
    plan: PackPlan,
    *,
    slab_bytes: int = SLAB_BYTES,
    threads: int = THREADS,
    pace: WriteLimits | None = None,
) -> list[bytes]:
    """Write all of ``plan`` and return the hash of each of its chunks. The caller finishes or aborts ``writer``.

    Memory: two slabs. Copies: one. Small packs use neither threads nor a second slab. A pack that is in memory in the layout of its file
    is written directly, without slab and copy. It must not change meanwhile.
    """
    pace = pace or WriteLimits(threads)
    threads = pace.threads
    if plan.image is not None:
        return _write_image(writer, plan, plan.image, slab_bytes, pace)
    slab_bytes = min(slab_bytes, -(-plan.size // PAGE) * PAGE)
    hashers: dict[int, tuple[Digest, int]] = {}
    hashes: list[bytes] = [b""] * len(plan.chunks)
    slabs = _slabs(plan, slab_bytes)

    def write(offset: int, buffer: memoryview) -> None:
        length = min(slab_bytes, plan.size - offset)
        _write(writer, offset, buffer, length)
        if pace.progress is not None:
            pace.progress(length)

    if plan.size <= slab_bytes:
        buffer = page_buffer(slab_bytes)
        for offset, pieces in slabs:
            for piece in pieces:
                _fill(buffer, piece, plan, hashers, hashes, pace.spent)
            write(offset, buffer)
        return _checked(hashes, plan)
    buffers = (page_buffer(slab_bytes), page_buffer(slab_bytes))
    with ThreadPool(threads, "relight-hash") as pool:
        filled: tuple[int, memoryview] | None = None
        for turn, (offset, pieces) in enumerate(slabs):
            buffer = buffers[turn % 2]
            jobs: list[Future[None]] = [
                pool.submit(_fill, buffer, piece, plan, hashers, hashes, pace.spent) for piece in pieces
            ]
            try:
                if filled:
                    write(*filled)
            finally:  # no thread may read the caller's memory after the return
                errors = [job.exception() for job in jobs]
            for error in errors:
                if error:
                    raise error
            filled = (offset, buffer)
        if filled:
            write(*filled)
    return _checked(hashes, plan)


def _slabs(plan: PackPlan, slab_bytes: int) -> Iterator[tuple[int, list[_SlabPiece]]]:
    """Yield the slabs of the file in order, as ``(offset, pieces)``."""
    sources = iter(plan.sources)
    source: Source | None = None
    used = 0
    offset, room, pieces = 0, slab_bytes, list[_SlabPiece]()
    for chunk, length in enumerate(plan.chunks):
        while length:
            take = min(length, room)
            spans: list[tuple[Source, int, int]] = []
            need = take
            while need:
                while source is None or used == source.length:
                    source, used = next(sources), 0
                step = min(need, source.length - used)
                spans.append((source, used, step))
                used += step
                need -= step
            pieces.append(_SlabPiece(chunk, slab_bytes - room, spans))
            length -= take
            room -= take
            if not room:
                yield offset, pieces
                offset, room, pieces = offset + slab_bytes, slab_bytes, []
    if pieces:
        yield offset, pieces


def _fill(
    buffer: memoryview,
    piece: _SlabPiece,
    plan: PackPlan,
    hashers: dict[int, tuple[Digest, int]],
    hashes: list[bytes],
    spent: WriteStats,
) -> None:
    filled = piece.start
    for source, start, length in piece.spans:
        copy_from(source, start, buffer[filled : filled + length])
        filled += length
    # Pieces of one chunk are in consecutive slabs, which are filled one after the other: the updates are in order.
    hasher, count = hashers.pop(piece.chunk) if piece.chunk in hashers else (Digest(), 0)
    with spent.hashing():
        hasher.update(buffer[piece.start : filled])
    count += filled - piece.start
    if count == plan.chunks[piece.chunk]:
        hashes[piece.chunk] = hasher.digest()
    else:
        hashers[piece.chunk] = (hasher, count)


def _write_image(writer: Writer, plan: PackPlan, image: memoryview, slab_bytes: int, pace: WriteLimits) -> list[bytes]:
    hashes: list[bytes] = []
    with (
        ThreadPool(pace.threads, "relight-hash", initializer=lower_after, initargs=(HASHERS_NICE,)) as hashers,
        ThreadPool(min(WRITES_AT_ONCE, pace.threads), "relight-write") as writers,
    ):
        jobs: deque[Future[bytes]] = deque()
        writes: deque[Future[None]] = deque()
        chunks = deque(_ranges(plan.chunks))
        progress_lock = threading.Lock()

        def write(offset: int, length: int) -> None:
            padded = -(-length // writer.align) * writer.align
            writer.write_at(offset, image[offset : offset + padded])
            if pace.progress is not None:
                with progress_lock:
                    pace.progress(length)

        def hash_on(available: int) -> None:
            while chunks and len(jobs) < _AHEAD and chunks[0][1] <= available:
                begin, end = chunks.popleft()
                jobs.append(hashers.submit(_hash, image[begin:end], pace.spent))

        def written(left: int) -> None:
            while len(writes) > left:
                writes.popleft().result()

        for offset in range(0, plan.size, slab_bytes):
            length = min(slab_bytes, plan.size - offset)
            hash_on(plan.size if plan.until is None else plan.until(offset + length))
            writes.append(writers.submit(write, offset, length))
            written(WRITES_AT_ONCE - 1)
            while jobs and jobs[0].done():
                hashes.append(jobs.popleft().result())
        written(0)
        while len(hashes) < len(plan.chunks):
            hash_on(plan.size)
            hashes.append(jobs.popleft().result())
    return _checked(hashes, plan)


def _hash(data: memoryview, spent: WriteStats) -> bytes:
    with spent.hashing():
        return Digest(data).digest()


def _ranges(lengths: list[int]) -> Iterator[tuple[int, int]]:
    offset = 0
    for length in lengths:
        yield offset, offset + length
        offset += length


def _write(writer: Writer, offset: int, buffer: memoryview, length: int) -> None:
    padded = -(-length // writer.align) * writer.align
    writer.write_at(offset, buffer[:padded])


def _checked(hashes: list[bytes], plan: PackPlan) -> list[bytes]:
    if not all(hashes):
        raise SaveFailed(
            "the sources did not fill the pack they were planned for", where=plan.file, hint="a bug: please report it"
        )
    return hashes
