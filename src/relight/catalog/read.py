"""Reading tensors: chunk by chunk, in file order, hashed as they arrive, straight into where they belong.

One thread reads, in the order of the file, so that the kernel reads ahead of it; others hash what it has read, while it is still in the
processor's cache. Several readers would defeat the reading ahead, and on a warm cache gain nothing: the hash is what takes the time.
"""

from __future__ import annotations

import queue
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import accumulate
from typing import NamedTuple

from relight.catalog.opened import Opened
from relight.errors import CheckpointNotFound, CorruptCheckpoint
from relight.format import Digest, Part, Tensor
from relight.format.manifest import Pack
from relight.format.strict import shown
from relight.layout import Sink
from relight.store import Reader

HASHERS = 2
SPARE_BUFFERS = 4
INLINE_BYTES = 1 << 20
"""Below this, threads cost more than they save."""

Progress = Callable[[int], None]


class _Want(NamedTuple):
    """One chunk to be read, and the tensors in it that are wanted: ``(tensor, sink, views)``."""

    pack: int
    chunk: int
    offset: int
    length: int
    hash: bytes
    takers: list[tuple[Tensor, Sink]]


class _Spares:
    """Buffers for chunks that do not go straight to where they belong: made when first needed, never more than ``SPARE_BUFFERS``."""

    def __init__(self) -> None:
        self._free: queue.LifoQueue[bytearray] = queue.LifoQueue()
        for _ in range(SPARE_BUFFERS):
            self._free.put(bytearray())

    def take(self, length: int) -> bytearray:
        """Waits for one to come back, if all are out."""
        buffer = self._free.get()
        return buffer if len(buffer) >= length else bytearray(length)

    def give(self, buffer: bytearray) -> None:
        self._free.put(buffer)


def read_tensors(
    opened: Opened, part: Part, sinks: Mapping[int, Sink], *, hashers: int = HASHERS, progress: Progress | None = None
) -> int:
    """Fill ``sinks``, keyed by index into ``part.tensors``, and give the number of bytes read.

    Each chunk is read once and checked before anything is made of it; ``CorruptCheckpoint`` names file, chunk and tensors. Sinks may
    then hold bytes that are wrong or missing: they are to be filled again or thrown away. Memory: ``SPARE_BUFFERS`` chunks.
    ``progress`` is called in other threads, with the bytes of each chunk that was found right.
    """
    plan = sorted(_plan(part, sinks).items())
    total = sum(want.length for _, wants in plan for want in wants)
    spares = _Spares()
    with ThreadPoolExecutor(hashers, thread_name_prefix="relight-hash") as pool:
        jobs: deque[Future[None]] = deque()
        try:
            for index, wants in plan:
                pack = part.packs[index]
                key = f"{opened.prefix}/{pack.file}"
                reader = _open(opened, key, pack)
                try:
                    for want in wants:
                        finish = _read(reader, want, key, spares, progress)
                        if total <= INLINE_BYTES:
                            finish()
                            continue
                        jobs.append(pool.submit(finish))
                        while jobs and jobs[0].done():  # what was found wrong ends the reading at once
                            jobs.popleft().result()
                finally:
                    reader.close()
            for job in jobs:
                job.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    return total


def _plan(part: Part, sinks: Mapping[int, Sink]) -> dict[int, list[_Want]]:
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
    plan: dict[int, list[_Want]] = {}
    for (pack, chunk), takers in sorted(wanted.items(), key=lambda item: item[0]):
        length, value = part.packs[pack].chunks[chunk]
        plan.setdefault(pack, []).append(_Want(pack, chunk, starts[pack][chunk], length, value, takers))
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


def _read(reader: Reader, want: _Want, key: str, spares: _Spares, progress: Progress | None) -> Callable[[], None]:
    """Read one chunk; what is given back checks it, and hands it on."""
    if len(want.takers) == 1:
        tensor, sink = want.takers[0]
        view = sink.view()
        start = want.offset - tensor.offset
        if view is not None and start >= 0 and start + want.length <= tensor.length:
            target = view[start : start + want.length]
            reader.read_into(want.offset, target)
            return partial(_check, target, want, key, progress)
    buffer = spares.take(want.length)
    try:
        reader.read_into(want.offset, memoryview(buffer)[: want.length])
    except BaseException:
        spares.give(buffer)
        raise
    return partial(_hand_on, buffer, want, key, spares, progress)


def _hand_on(buffer: bytearray, want: _Want, key: str, spares: _Spares, progress: Progress | None) -> None:
    try:
        held = memoryview(buffer)[: want.length]
        _check(held, want, key, progress)
        for tensor, sink in want.takers:
            begin, end = max(want.offset, tensor.offset), min(want.offset + want.length, tensor.offset + tensor.length)
            data = held[begin - want.offset : end - want.offset]
            view = sink.view()
            if view is not None:
                view[begin - tensor.offset : end - tensor.offset] = data
            else:
                sink.absorb(begin - tensor.offset, data)
    finally:
        spares.give(buffer)


def _check(data: memoryview, want: _Want, key: str, progress: Progress | None) -> None:
    if Digest(data).digest() != want.hash:
        names = [shown(tensor.name) for tensor, _ in want.takers[:3]]
        held = ", ".join(names) + (f" and {len(want.takers) - 3} more" if len(want.takers) > 3 else "")
        raise CorruptCheckpoint(
            f"chunk {want.chunk} (bytes {want.offset}–{want.offset + want.length}) is not what was committed; it holds {held}",
            where=key,
        )
    if progress:
        progress(want.length)
