"""A slot of an arena: a header page, packs in the layout of their files, and the request of the save.

::

    0       header: magic, state, number of the save, where the request is
    4096    pack 0, byte for byte as its file: header, then tensors      (each pack starts on a page, so direct I/O can write it from here)
    …       pack 1 …
    …       the request: the tree and the contents of the root, encoded

A snapshot is complete when its state is SEALED. Everything that the commit needs is then in this memory, and the process that filled it
may die. The state is written last. A store of an aligned 8-byte word is atomic on all supported machines.

While the state is FILLING, a counter shows up to which offset the bytes are final. A process that reads these bytes early must see the
slot SEALED before it uses the results.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from relight.arena.memory import PAGE, SharedMapping
from relight.errors import CorruptCheckpoint

BODY_OFFSET = 4096
EMPTY, FILLING, SEALED = 0, 1, 2
_MAGIC = b"relight1"
_HEADER = struct.Struct("<8sQQQQ")
_WRITTEN, _COPIED = 64, 128
"""Offsets of two counters, each in its own cache line: bytes written to the store (set by the reader), and the filled offset."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Offsets of the packs and of the request in a slot, and the slot's size. All are multiples of a page."""

    packs: tuple[int, ...]
    request: int
    size: int


def lay_out(pack_sizes: Sequence[int], request_bytes: int) -> SlotLayout:
    """Return the layout: packs one after the other, each page-aligned, then ``request_bytes`` for the request."""
    offset = BODY_OFFSET
    starts = []
    for size in pack_sizes:
        starts.append(offset)
        offset += _pages(size)
    return SlotLayout(tuple(starts), offset, offset + _pages(request_bytes))


class Slot:
    """A mapped slot. One process fills it; another reads it after it is SEALED."""

    def __init__(self, memory: SharedMapping) -> None:
        self.memory = memory
        self.view = memory.view

    def begin(self, number: int) -> None:
        """Start filling save ``number``. Previous contents are invalid from now on."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, 0, 0)
        struct.pack_into("<Q", self.view, _WRITTEN, 0)
        struct.pack_into("<Q", self.view, _COPIED, 0)

    def announce(self, number: int, start: int, length: int) -> None:
        """Publish the request at ``start`` before the packs are filled."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, start, length)

    def set_copied(self, offset: int) -> None:
        """Publish that all bytes before ``offset`` are final, except the packs' headers."""
        struct.pack_into("<Q", self.view, _COPIED, offset)

    @property
    def copied(self) -> int:
        """Offset up to which the slot is filled."""
        return int(struct.unpack_from("<Q", self.view, _COPIED)[0])

    def seal(self, number: int, start: int, length: int) -> None:
        """Seal the complete slot, with the request at ``start``. The state is written last."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, start, length)
        struct.pack_into("<Q", self.view, 8, SEALED)

    def set_written(self, count: int) -> None:
        """Publish that ``count`` bytes of the packs were written. The reader writes only this and the packs' headers to a slot."""
        struct.pack_into("<Q", self.view, _WRITTEN, count)

    @property
    def written(self) -> int:
        """Bytes of the packs that have been written."""
        return int(struct.unpack_from("<Q", self.view, _WRITTEN)[0])

    def clear(self) -> None:
        """Mark the slot empty."""
        _HEADER.pack_into(self.view, 0, _MAGIC, EMPTY, 0, 0, 0)

    def state(self) -> tuple[int, int]:
        """Return ``(state, number)``."""
        magic, state, number, _, _ = _HEADER.unpack_from(self.view, 0)
        return (state, number) if magic == _MAGIC else (EMPTY, 0)

    def request(self) -> memoryview:
        """Return the request of a sealed slot, or an announced one. Raise ``CorruptCheckpoint`` if there is none."""
        magic, state, _, start, length = _HEADER.unpack_from(self.view, 0)
        if magic != _MAGIC or state == EMPTY or start < BODY_OFFSET or start + length > len(self.view):
            raise CorruptCheckpoint("shared memory holds no complete snapshot", where="shared memory")
        return self.view[start : start + length]


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
