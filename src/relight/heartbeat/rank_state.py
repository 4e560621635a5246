"""What a rank leaves for the case that it dies: the little that is its own, at the end of each step, in a file of memory.

Its replicas hold the rest. The file outlives the process; a rank that died while it wrote leaves nothing. A second file, written in front
of a step's update, has what will be its own at that step's end if nothing draws from it until then: a rank may die during the update, too.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from relight.heartbeat.heartbeat_page import mapped

WILL_BYTES = 1 << 20
_HEAD = struct.Struct("<8sQqQ")
_COUNTER = struct.Struct("<Q")
_MAGIC = b"rlwill01"


class RankState(NamedTuple):
    """What a rank left at the end of a step."""

    step: int
    data: bytes


class RankStateWriter:
    """A rank's own end. One thread."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The file is there already, of ``WILL_BYTES``. ``OSError`` if it is not, or there is no room for it."""
        self._memory = mapped(path, WILL_BYTES)
        self._count = 0

    def write(self, step: int, data: bytes) -> bool:
        """In place of what was there. False, and nothing is left, if there is no room."""
        self._count += 2
        fits = len(data) <= WILL_BYTES - _HEAD.size
        _COUNTER.pack_into(self._memory, 8, self._count - 1)
        if fits:
            self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, 0, _MAGIC, self._count - 1, step, len(data) if fits else 0)
        _COUNTER.pack_into(self._memory, 8, self._count if fits else self._count - 1)
        return fits


def make_rank_state(path: str | os.PathLike[str]) -> None:
    """An empty one, for a rank to come."""
    with open(path, "wb") as file:
        file.truncate(WILL_BYTES)


def read_rank_state(path: str | os.PathLike[str]) -> RankState | None:
    """What a rank left; None if it left nothing, nothing whole, or writes just now."""
    try:
        with open(path, "rb") as file:
            data = file.read(WILL_BYTES)
            if len(data) < _HEAD.size:
                return None
            magic, count, step, length = _HEAD.unpack_from(data)
            file.seek(8)
            if magic != _MAGIC or count % 2 or length > len(data) - _HEAD.size or file.read(8) != _COUNTER.pack(count):
                return None
    except OSError:
        return None
    return RankState(step, data[_HEAD.size : _HEAD.size + length])


def rank_state_path(page: str | os.PathLike[str], rank: int, ahead: bool = False) -> Path:
    """Where ``rank`` leaves its own, given any rank's page: beside it. ``ahead``: what it leaves in front of an update."""
    return Path(page).with_name(f"{'ahead' if ahead else 'will'}-{rank}")


def lost_of(page: str | os.PathLike[str]) -> Path:
    """Is there once a rank of this life has failed, given any rank's page."""
    return Path(page).with_name("lost")
