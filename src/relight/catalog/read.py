"""Reading tensors: chunk by chunk, in file order, hashed as they arrive, straight into where they belong."""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate
from typing import NamedTuple

from relight.catalog.opened import Opened
from relight.errors import CheckpointNotFound, CorruptCheckpoint
from relight.format import Digest, Part, Tensor
from relight.format.manifest import Pack
from relight.format.strict import shown
from relight.layout import Sink
from relight.store import Reader

THREADS = 4
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


class _Scratch(threading.local):
    """A buffer per thread, for chunks that do not go straight to where they belong."""

    buffer = bytearray()

    def get(self, length: int) -> memoryview:
        if len(self.buffer) < length:
            self.buffer = bytearray(length)
        return memoryview(self.buffer)[:length]


def read_tensors(
    opened: Opened, part: Part, sinks: Mapping[int, Sink], *, threads: int = THREADS, progress: Progress | None = None
) -> int:
    """Fill ``sinks``, keyed by index into ``part.tensors``, and give the number of bytes read.

    Each chunk is read once and checked before anything is made of it; ``CorruptCheckpoint`` names file, chunk and tensors. Sinks may
    then hold bytes that are wrong or missing: they are to be filled again or thrown away. Memory: one chunk a thread.
    """
    scratch = _Scratch()
    total = 0
    for index, wants in sorted(_plan(part, sinks).items()):
        pack = part.packs[index]
        key = f"{opened.prefix}/{pack.file}"
        reader = _open(opened, key, pack)
        try:
            size = sum(want.length for want in wants)
            total += size

            def one(want: _Want, reader: Reader = reader, key: str = key) -> None:
                _read(reader, want, key, scratch)
                if progress:
                    progress(want.length)

            if size <= INLINE_BYTES or threads <= 1:
                for want in wants:
                    one(want)
            else:
                with ThreadPoolExecutor(threads, thread_name_prefix="relight-read") as pool:
                    jobs = [pool.submit(one, want) for want in wants]
                    try:
                        for job in jobs:
                            job.result()
                    except BaseException:
                        pool.shutdown(wait=True, cancel_futures=True)
                        raise
        finally:
            reader.close()
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


def _read(reader: Reader, want: _Want, key: str, scratch: _Scratch) -> None:
    if len(want.takers) == 1:
        tensor, sink = want.takers[0]
        view = sink.view()
        start = want.offset - tensor.offset
        if view is not None and start >= 0 and start + want.length <= tensor.length:
            target = view[start : start + want.length]
            reader.read_into(want.offset, target)
            _check(target, want, key)
            return
    buffer = scratch.get(want.length)
    reader.read_into(want.offset, buffer)
    _check(buffer, want, key)
    for tensor, sink in want.takers:
        begin, end = max(want.offset, tensor.offset), min(want.offset + want.length, tensor.offset + tensor.length)
        data = buffer[begin - want.offset : end - want.offset]
        view = sink.view()
        if view is not None:
            view[begin - tensor.offset : end - tensor.offset] = data
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
