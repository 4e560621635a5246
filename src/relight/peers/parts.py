"""What is to be protected: ranks' parts of checkpoints as they lie in this node's memory, and how each is cut into segments."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relight.arena import SharedMapping
from relight.peers.galois import BLOCK
from relight.peers.messages import Own

KEPT_MAX = 4
"""Of a lane: more checkpoints than a node has slots for are not in its memory."""


class HeldPartFile(NamedTuple):
    """A rank's part of a committed checkpoint, in a slot of its node's agent.

    ``seq`` tells newer from older, for all agents and attempts alike: the epoch above, the number of the save below. ``lane``: the
    how many-th of its node's ranks it is, from 0. ``starts`` and ``sizes`` are its packs' in ``memory``, which stays the caller's.
    ``is_there``, in any thread and at any time: whether the memory still holds this part, and held nothing else since it was offered.
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
        """Bytes of its blob: from the beginning of its first pack to the end of its last."""
        return blob_length(self.starts, self.sizes)

    def there(self) -> bool:
        """What ``is_there`` says; no, if all of its memory is let go of."""
        try:
            return self.is_there()
        except ValueError:  # a view that was released
            return False

    def read(self, offset: int, length: int) -> memoryview | None:
        """A view of those bytes of the blob, no copy; None if they are not there. What is made of it counts if it is ``there`` after."""
        if offset + length > self.length or not self.there():
            return None
        begin = min(self.starts, default=0) + offset
        try:
            found = self.memory.view[begin : begin + length].toreadonly()
        except ValueError:  # let go of meanwhile
            return None
        return found if len(found) == length else None


def blob_length(starts: Sequence[int], sizes: Sequence[int]) -> int:
    """Bytes from the beginning of the first pack to the end of the last."""
    return max((start + size for start, size in zip(starts, sizes)), default=0) - min(starts, default=0)


def cut(length: int, pieces: int) -> list[tuple[int, int]]:
    """``(offset, length)`` of each of so many segments: as equal as whole blocks can be, the last ones shorter, or of no length."""
    step = -(-length // (pieces * BLOCK)) * BLOCK
    return [(min(at * step, length), max(0, min(step, length - at * step))) for at in range(pieces)]


class Parts:
    """What this agent can serve of its own. Any thread."""

    def __init__(self) -> None:
        self._held: dict[tuple[str, int], HeldPartFile] = {}
        self._lock = threading.Lock()

    def add(self, part: HeldPartFile) -> None:
        """Serve it from now on, as long as it is there."""
        with self._lock:
            self._held.pop((part.id, part.rank), None)
            self._held[part.id, part.rank] = part
            lane = [one for one in self._held.values() if one.lane == part.lane]
            gone = [one for one in self._held.values() if not one.there()]
            for one in {(one.id, one.rank) for one in gone + lane[:-KEPT_MAX]}:
                del self._held[one]

    def remove(self, id: str, rank: int) -> HeldPartFile | None:
        """Serve it no more."""
        with self._lock:
            return self._held.pop((id, rank), None)

    def clear(self) -> None:
        """Serve nothing more."""
        with self._lock:
            self._held.clear()

    def find(self, id: str, rank: int) -> HeldPartFile | None:
        """It, if it was added; whether it is still there is another question."""
        with self._lock:
            return self._held.get((id, rank))

    def there(self) -> list[HeldPartFile]:
        """All that is there, oldest first."""
        with self._lock:
            held = list(self._held.values())
        return sorted((one for one in held if one.there()), key=lambda one: (one.seq, one.lane))

    def newest(self) -> list[HeldPartFile]:
        """Of each lane the newest that is there."""
        return list({one.lane: one for one in self.there()}.values())

    def inventory(self) -> list[Own]:
        """All that is there, as others are told."""
        return [Own(one.id, one.seq, one.rank, one.lane, one.starts, one.sizes) for one in self.there()]
