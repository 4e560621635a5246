"""Ranks' parts of checkpoints in this node's memory, which other agents protect, and how a part is cut into
segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relight.arena import SharedMapping
from relight.peers.galois import BLOCK
from relight.peers.messages import Own, ReadRequest

KEPT_MAX = 4
"""Most parts kept for each lane. A node's memory has no slots for more checkpoints."""


class HeldPartFile(NamedTuple):
    """A rank's part of a committed checkpoint, in a slot of its node's agent.

    ``seq`` orders checkpoints across all agents and attempts: the epoch in the high bits, the save's number in the low
    bits. ``lane``: the local rank, from 0. ``starts`` and ``sizes`` are those of its packs in ``memory``, which the
    caller owns. ``is_there`` returns whether the memory still holds this part, and held nothing else since it was
    offered. It is called in any thread, at any time.
    """

    id: str
    seq: int
    rank: int
    lane: int
    memory: SharedMapping
    starts: tuple[int, ...]
    sizes: tuple[int, ...]
    is_there: Callable[[], bool]

    @property
    def length(self) -> int:
        """Return the bytes of its blob: from the start of its first pack to the end of its last."""
        return blob_length(self.starts, self.sizes)

    def there(self) -> bool:
        """Return ``is_there()``; False if all of its memory was released."""
        try:
            return self.is_there()
        except ValueError:  # a view that was released
            return False

    def read(self, offset: int, length: int) -> memoryview | None:
        """Return a view of those bytes of the blob, without a copy; None if they are gone.

        The caller must check ``there()`` after it has used the bytes: they may have changed meanwhile.
        """
        if offset + length > self.length or not self.there():
            return None
        begin = min(self.starts, default=0) + offset
        try:
            view = self.memory.view[begin : begin + length].toreadonly()
        except ValueError:  # released meanwhile
            return None
        return view if len(view) == length else None


def blob_length(starts: Sequence[int], sizes: Sequence[int]) -> int:
    """Return the bytes from the start of the first pack to the end of the last."""
    return max((start + size for start, size in zip(starts, sizes)), default=0) - min(starts, default=0)


def cut(length: int, pieces: int) -> list[tuple[int, int]]:
    """Return ``(offset, length)`` of ``pieces`` segments: equal numbers of whole blocks, the last ones shorter or
    empty."""
    step = -(-length // (pieces * BLOCK)) * BLOCK
    return [(min(number * step, length), max(0, min(step, length - number * step))) for number in range(pieces)]


class Parts:
    """The parts of its own node that an agent serves. Any thread."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], HeldPartFile] = {}
        self._lock = threading.Lock()

    def add(self, part: HeldPartFile) -> None:
        """Serve a part from now on, as long as it is in memory."""
        with self._lock:
            self._held.pop((part.id, part.rank), None)
            self._held[part.id, part.rank] = part
            lane = [kept for kept in self._held.values() if kept.lane == part.lane]
            gone = [kept for kept in self._held.values() if not kept.there()]
            for key in {(kept.id, kept.rank) for kept in gone + lane[:-KEPT_MAX]}:
                del self._held[key]

    def remove(self, id: str, rank: int) -> HeldPartFile | None:
        """Stop serving a part. Return it; None if it was not served."""
        with self._lock:
            return self._held.pop((id, rank), None)

    def clear(self) -> None:
        """Stop serving all parts."""
        with self._lock:
            self._held.clear()

    def find(self, id: str, rank: int) -> HeldPartFile | None:
        """Return a part that was added, or None. It may be gone from memory: check ``there()``."""
        with self._lock:
            return self._held.get((id, rank))

    def locate(self, read: ReadRequest) -> tuple[SharedMapping, int]:
        """Return the memory of a part, and where its blob begins. ``ValueError`` if it is gone."""
        part = self.find(read.id, read.rank)
        if part is None or not part.there():
            raise ValueError("gone")
        return part.memory, min(part.starts, default=0)

    def there(self) -> list[HeldPartFile]:
        """Return the parts that are in memory, oldest first."""
        with self._lock:
            parts = list(self._held.values())
        return sorted((part for part in parts if part.there()), key=lambda part: (part.seq, part.lane))

    def newest(self) -> list[HeldPartFile]:
        """Return the newest part of each lane that is in memory."""
        return list({part.lane: part for part in self.there()}.values())

    def inventory(self) -> list[Own]:
        """Return the descriptions, for other agents, of the parts that are in memory."""
        return [Own(part.id, part.seq, part.rank, part.lane, part.starts, part.sizes) for part in self.there()]
