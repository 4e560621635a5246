"""The part of the state that only one rank has, published at the end of each step in a file in memory, for a handover
if the rank dies.

The rank's replicas have the rest. The file outlives the process. If the rank died while it wrote, the file is invalid.
A second file is written before a step's update. It has the rank state at that step's end if no random number is drawn
until then: a rank may die during the update, too.
"""

from __future__ import annotations

import os
import struct
from pathlib import Path
from typing import NamedTuple

from relight.heartbeat.heartbeat_page import mapped

RANK_STATE_BYTES = 1 << 20
_HEAD = struct.Struct("<8sQqQ")
_COUNTER = struct.Struct("<Q")
_MAGIC = b"rlwill01"


class RankState(NamedTuple):
    """The rank state at the end of a step."""

    step: int
    data: bytes


class RankStateWriter:
    """The writer's end of a rank's file. One thread."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the existing file of ``RANK_STATE_BYTES``. Raise ``OSError`` if there is none, or no space for it."""
        self._memory = mapped(path, RANK_STATE_BYTES)
        self._count = 0

    def write(self, step: int, data: bytes) -> bool:
        """Replace the state. Return False, and leave none, if ``data`` does not fit."""
        self._count += 2
        fits = len(data) <= RANK_STATE_BYTES - _HEAD.size
        _COUNTER.pack_into(self._memory, 8, self._count - 1)
        if fits:
            self._memory[_HEAD.size : _HEAD.size + len(data)] = data
        _HEAD.pack_into(self._memory, 0, _MAGIC, self._count - 1, step, len(data) if fits else 0)
        _COUNTER.pack_into(self._memory, 8, self._count if fits else self._count - 1)
        return fits


def make_rank_state(path: str | os.PathLike[str]) -> None:
    """Create an empty file for a later rank."""
    with open(path, "wb") as file:
        file.truncate(RANK_STATE_BYTES)


def read_rank_state(path: str | os.PathLike[str]) -> RankState | None:
    """Return a rank's state; None if there is none, it is incomplete, or it is being written."""
    try:
        with open(path, "rb") as file:
            data = file.read(RANK_STATE_BYTES)
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
    """Return the file of ``rank``'s state, next to any rank's page. ``ahead``: the file that is written before an
    update."""
    return Path(page).with_name(f"{'ahead' if ahead else 'will'}-{rank}")


def lost_of(page: str | os.PathLike[str]) -> Path:
    """Return the marker file that exists once a rank of this incarnation has failed, next to any rank's page."""
    return Path(page).with_name("lost")
