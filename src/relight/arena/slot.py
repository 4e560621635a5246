"""One slot of an arena: a page of header, packs exactly as their files will be, and what else a save needs.

::

    0       header: magic, state, number of the save, where the request is
    4096    pack 0, byte for byte as its file: header, then tensors      (each pack starts on a page, so direct I/O can write it from here)
    …       pack 1 …
    …       the request: the tree and what the root says, encoded

A save is complete the moment its state is SEALED: everything that the commit needs is then in this memory, and the process that filled it
may die. State is written last; on every machine that runs this, a store of an aligned 8-byte word is seen whole or not at all.

While it is FILLING a word tells up to where all bytes are what they will be. Who reads them so early must see it SEALED before anything
that it made of them counts.
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
"""Two counters, each on a cache line of its own: how much is on the disk, told by the reader; up to where the slot is filled."""


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where packs begin in a slot, where the request may lie, and how long the slot must be. All multiples of a page."""

    packs: tuple[int, ...]
    request: int
    size: int


def lay_out(pack_sizes: Sequence[int], request_bytes: int) -> SlotLayout:
    """Packs one after the other, each on a page of its own, then room for ``request_bytes``."""
    at = BODY_OFFSET
    starts = []
    for size in pack_sizes:
        starts.append(at)
        at += _pages(size)
    return SlotLayout(tuple(starts), at, at + _pages(request_bytes))


class Slot:
    """A mapped slot. One process fills it, another reads it once it is SEALED."""

    def __init__(self, memory: SharedMapping) -> None:
        self.memory = memory
        self.view = memory.view

    def begin(self, number: int) -> None:
        """The filling of save ``number`` begins: what was there counts for nothing from now on."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, 0, 0)
        struct.pack_into("<Q", self.view, _WRITTEN, 0)
        struct.pack_into("<Q", self.view, _COPIED, 0)

    def announce(self, number: int, start: int, length: int) -> None:
        """The request lies at ``start``; the packs follow."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, start, length)

    def set_copied(self, offset: int) -> None:
        """All before ``offset``, but for the packs' headers, is as it will be sealed, if it ever is."""
        struct.pack_into("<Q", self.view, _COPIED, offset)

    @property
    def copied(self) -> int:
        """Up to where the slot is filled."""
        return int(struct.unpack_from("<Q", self.view, _COPIED)[0])

    def seal(self, number: int, start: int, length: int) -> None:
        """All is there; the request lies at ``start``. The state goes last."""
        _HEADER.pack_into(self.view, 0, _MAGIC, FILLING, number, start, length)
        struct.pack_into("<Q", self.view, 8, SEALED)

    def set_written(self, count: int) -> None:
        """``count`` bytes of the packs have been written. All that its reader writes to a slot, but for the packs' headers."""
        struct.pack_into("<Q", self.view, _WRITTEN, count)

    @property
    def written(self) -> int:
        """Bytes of the packs that have been written."""
        return int(struct.unpack_from("<Q", self.view, _WRITTEN)[0])

    def clear(self) -> None:
        """Nothing is in it."""
        _HEADER.pack_into(self.view, 0, _MAGIC, EMPTY, 0, 0, 0)

    def state(self) -> tuple[int, int]:
        """``(state, number)``."""
        magic, state, number, _, _ = _HEADER.unpack_from(self.view, 0)
        return (state, number) if magic == _MAGIC else (EMPTY, 0)

    def request(self) -> memoryview:
        """The request of a sealed slot, or of one that announced it. ``CorruptCheckpoint`` if there is none."""
        magic, state, _, start, length = _HEADER.unpack_from(self.view, 0)
        if magic != _MAGIC or state == EMPTY or start < BODY_OFFSET or start + length > len(self.view):
            raise CorruptCheckpoint("nothing is sealed in this slot", where="shared memory")
        return self.view[start : start + length]


def _pages(size: int) -> int:
    return -(-size // PAGE) * PAGE
