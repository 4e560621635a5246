"""Checkpoints by reference, for tasks that run in other processes: where a process finds one, and ranges of its packs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import msgspec

from relight.decode import from_msgpack
from relight.errors import ConfigError
from relight.format.collector import collector_paused
from relight.format.manifest import Pack
from relight.log import Checkpoint
from relight.reader.opened import Opened, open_checkpoint
from relight.store import ByteStore, open_bytes
from relight.store.base import without_cache

TASK_BYTES = 64 << 20
"""Bytes of a checkpoint that one task reads: much longer work than its start, and little to do again for a lost process."""
MEMORY_SCHEME = "memory:"


class CheckpointReference(NamedTuple):
    """A checkpoint in its store, as its record states it. Keys and credentials come from each process's own settings."""

    url: str
    run: str
    """The directory of the run that has its files."""
    record: bytes
    """The ``Checkpoint``, as MessagePack."""
    store_id: str
    run_id: str


class PackRange(NamedTuple):
    """Chunks ``first`` to ``last`` (exclusive) of a pack: number ``pack`` of part number ``part``."""

    part: int
    pack: int
    first: int
    last: int

    def bytes_of(self, packs: list[Pack]) -> int:
        """Return the length of the chunks in the part's ``packs``."""
        return sum(length for length, _ in packs[self.pack].chunks[self.first : self.last])


def reference_to(opened: Opened) -> CheckpointReference:
    """Return the reference to a checkpoint. Raise ``ConfigError`` if its store is in this process's memory."""
    run, root = opened.prefix.partition("/")[0], opened.root
    record = msgspec.msgpack.encode(opened.checkpoint)
    return CheckpointReference(shared_url(opened.store), run, record, root.store, root.run)


def shared_url(store: ByteStore) -> str:
    """Return the URL by which other processes open a store. Raise ``ConfigError`` if they cannot."""
    if store.url.startswith(MEMORY_SCHEME):
        raise ConfigError("this store is in the memory of one process", where=store.url, hint="--engine local")
    return store.url


@lru_cache(maxsize=2)
def open_reference(reference: CheckpointReference) -> Opened:
    """Open a checkpoint, bypassing caches of its bytes. The last two stay open in each process, as tasks come in their order."""
    store, checkpoint = without_cache(open_bytes(reference.url)), from_msgpack(reference.record, Checkpoint)
    with collector_paused():
        return open_checkpoint(store, reference.run, checkpoint, store_id=reference.store_id, run_id=reference.run_id)


def ranges_of(opened: Opened) -> Iterator[PackRange]:
    """Yield ranges that make up all packs of a checkpoint, in order, of about ``TASK_BYTES`` each."""
    for number in range(len(opened.parts)):
        yield from ranges_of_part(opened, number)


def ranges_of_part(opened: Opened, number: int) -> list[PackRange]:
    """Return the ranges that make up a part's packs."""
    ranges: list[PackRange] = []
    for index, pack in enumerate(opened.parts[number].packs):
        first = size = 0
        for chunk, (length, _) in enumerate(pack.chunks):
            if size and size + length > TASK_BYTES:
                ranges.append(PackRange(number, index, first, chunk))
                first, size = chunk, 0
            size += length
        ranges.append(PackRange(number, index, first, len(pack.chunks)))
    return ranges
