"""Reading tensors: in file order, hashed as they arrive, each byte read once.

What lies in the page cache goes from there straight to where it belongs. All else is read past the page cache into a few buffers: that is
what reaches the device's speed, run after run, and leaves to others the memory they cache with. Two threads read, so that the device
always has something to do; others hash what was read, and move it on while the processor's cache still has it.
"""

from __future__ import annotations

import queue
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

from relight.catalog.opened import Opened
from relight.errors import CheckpointNotFound, CorruptCheckpoint
from relight.format import Digest, Part, Tensor
from relight.format.manifest import Pack
from relight.format.strict import shown
from relight.layout import Sink
from relight.layout.sources import copy_bytes
from relight.store import PAGE, Reader, page_buffer

READERS = 2
HASHERS = 2
READ_BYTES = 4 << 20
"""Chunks that follow one another are read together up to this size."""
INLINE_BYTES = 1 << 20
"""Below this, threads cost more than they save."""

Progress = Callable[[int], None]


class _Want(NamedTuple):
    """One chunk to be read, and the tensors in it that are wanted: ``(tensor, sink)``."""

    chunk: int
    offset: int
    length: int
    hash: bytes
    takers: list[tuple[Tensor, Sink]]


class _Run(NamedTuple):
    """Chunks that follow one another in a pack, read in one go."""

    offset: int
    length: int
    wants: list[_Want]


class _File(NamedTuple):
    key: str
    reader: Reader


def read_tensors(
    opened: Opened,
    part: Part,
    sinks: Mapping[int, Sink],
    *,
    readers: int = READERS,
    hashers: int = HASHERS,
    progress: Progress | None = None,
) -> int:
    """Fill ``sinks``, keyed by index into ``part.tensors``, and give the number of bytes read.

    Each chunk is read once and checked before anything is made of it; ``CorruptCheckpoint`` names file, chunk and tensors. Sinks may
    then hold bytes that are wrong or missing: they are to be filled again or thrown away. Memory: ``readers + hashers + 1`` buffers of
    ``READ_BYTES``, or of the longest chunk. ``progress`` is called in other threads, with the bytes of each chunk that was found right.
    """
    plan = sorted(_plan(part, sinks).items())
    total = sum(run.length for _, runs in plan for run in runs)
    longest = max((run.length for _, runs in plan for run in runs), default=0)
    if total <= INLINE_BYTES:
        readers = hashers = 0
    work = _Work(readers, hashers, longest, progress)
    try:
        for index, runs in plan:
            pack = part.packs[index]
            key = f"{opened.prefix}/{pack.file}"
            file = _File(key, _open(opened, key, pack))
            try:
                work.read(file, runs)
            finally:
                file.reader.close()
        work.finish()
    finally:
        work.stop()
    return total


class _Work:
    """The threads, and the buffers between them."""

    def __init__(self, readers: int, hashers: int, longest: int, progress: Progress | None) -> None:
        self._progress = progress
        self._threads = readers
        self._hashing: list[Future[None]] = []
        self._failed = False
        self._room_bytes = longest + 2 * PAGE
        self._rooms: queue.SimpleQueue[memoryview | None] = queue.SimpleQueue()
        for _ in range(readers + hashers + 1):
            self._rooms.put(None)  # made when it is needed
        if readers:
            self._readers = ThreadPoolExecutor(readers, thread_name_prefix="relight-read")
            self._hashers = ThreadPoolExecutor(hashers, thread_name_prefix="relight-hash")

    def read(self, file: _File, runs: list[_Run]) -> None:
        """Read all of ``runs``; what was read may still be waiting to be hashed."""
        if not self._threads:
            for run in runs:
                self._read(file, run)
            return
        queued = iter(runs)
        pending = [self._readers.submit(self._drain, file, queued) for _ in range(self._threads)]
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

    def _drain(self, file: _File, queued: Iterator[_Run]) -> None:
        while not self._failed:
            run = next(queued, None)  # a list's iterator: one step at a time, whoever asks
            if run is None:
                return
            try:
                self._read(file, run)
            except BaseException:
                self._failed = True
                raise

    def _read(self, file: _File, run: _Run) -> None:
        room = self._rooms.get() or page_buffer(self._room_bytes)
        try:
            data = file.reader.fetch(run.offset, run.length, room)
            target = _target(run) if data is None else None
            if data is None:
                data = room[: run.length] if target is None else target
                file.reader.read_into(run.offset, data)
            if self._threads:
                self._hashing.append(self._hashers.submit(self._settle, file.key, run, data, data is not target, room))
                return
        except BaseException:
            self._rooms.put(room)
            raise
        self._settle(file.key, run, data, data is not target, room)

    def _settle(self, key: str, run: _Run, data: memoryview, on_its_way: bool, room: memoryview) -> None:
        """Check what was read, and hand it on if it isn't where it belongs."""
        try:
            if self._failed:
                return
            for want in run.wants:
                held = data[want.offset - run.offset :][: want.length]
                _check(held, want, key)
                if on_its_way:
                    _hand_on(held, want)
                if self._progress:
                    self._progress(want.length)
        except BaseException:
            self._failed = True
            raise
        finally:
            self._rooms.put(room)


def read_chunk(reader: Reader, offset: int, length: int, room: memoryview) -> memoryview:
    """Bytes of a file, past the page cache if that is the better way; in ``room``, a ``page_buffer`` two ``PAGE``s longer."""
    data = reader.fetch(offset, length, room)
    if data is None:
        data = room[:length]
        reader.read_into(offset, data)
    return data


def _plan(part: Part, sinks: Mapping[int, Sink]) -> dict[int, list[_Run]]:
    starts = [[0, *accumulate(length for length, _ in pack.chunks)] for pack in part.packs]
    wanted: dict[tuple[int, int], list[tuple[Tensor, Sink]]] = {}
    for index, sink in sinks.items():
        tensor = part.tensors[index]
        if sink.length != tensor.length:
            raise AssertionError(f"a sink of {sink.length} bytes for {tensor.name}, which has {tensor.length}")
        if not tensor.length:
            continue
        edges = starts[tensor.pack]
        chunk = bisect_right(edges, tensor.offset) - 1
        while chunk < len(edges) - 1 and edges[chunk] < tensor.offset + tensor.length:
            wanted.setdefault((tensor.pack, chunk), []).append((tensor, sink))
            chunk += 1
    plan: dict[int, list[_Run]] = {}
    for (pack, chunk), takers in sorted(wanted.items(), key=lambda item: item[0]):
        length, value = part.packs[pack].chunks[chunk]
        want = _Want(chunk, starts[pack][chunk], length, value, takers)
        runs = plan.setdefault(pack, [])
        last = runs[-1] if runs else None
        if last and last.offset + last.length == want.offset and last.length + length <= READ_BYTES:
            last.wants.append(want)
            runs[-1] = last._replace(length=last.length + length)
        else:
            runs.append(_Run(want.offset, length, [want]))
    return plan


def _open(opened: Opened, key: str, pack: Pack) -> Reader:
    try:
        reader = opened.store.open(key)
    except CheckpointNotFound as error:
        raise CorruptCheckpoint("a file of this checkpoint is missing", where=key) from error
    if reader.size != pack.size:
        reader.close()
        raise CorruptCheckpoint(f"{reader.size} bytes long, {pack.size} were committed", where=key)
    return reader


def _target(run: _Run) -> memoryview | None:
    """Where the run may be read to at once: a single chunk that is all one tensor's."""
    if len(run.wants) != 1 or len(run.wants[0].takers) != 1:
        return None
    tensor, sink = run.wants[0].takers[0]
    start = run.offset - tensor.offset
    view = sink.view()
    if view is None or start < 0 or start + run.length > tensor.length:
        return None
    return view[start : start + run.length]


def _hand_on(held: memoryview, want: _Want) -> None:
    for tensor, sink in want.takers:
        begin, end = max(want.offset, tensor.offset), min(want.offset + want.length, tensor.offset + tensor.length)
        data = held[begin - want.offset : end - want.offset]
        view = sink.view()
        if view is not None:
            copy_bytes(data, view[begin - tensor.offset : end - tensor.offset])
        else:
            sink.absorb(begin - tensor.offset, data)


def _check(data: memoryview, want: _Want, key: str) -> None:
    if Digest(data).digest() != want.hash:
        names = [shown(tensor.name) for tensor, _ in want.takers[:3]]
        held = ", ".join(names) + (f" and {len(want.takers) - 3} more" if len(want.takers) > 3 else "")
        raise CorruptCheckpoint(
            f"chunk {want.chunk} (bytes {want.offset}–{want.offset + want.length}) is not what was committed; it holds {held}",
            where=key,
        )
