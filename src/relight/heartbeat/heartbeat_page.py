"""The page: one fixed record under a counter. A writer makes the counter odd, writes, makes it even; who finds it odd looks again."""

from __future__ import annotations

import mmap
import os
import stat
import struct
from typing import NamedTuple

PAGE_BYTES = 4096
LATE_AFTER = 3.0
"""A phase is late once it has taken so many times as long as it should, and some seconds."""
UPDATING = 2
"""Of ``Beat.heir``: it is in the midst of its update."""
NOT_YET = -2
"""In place of a step: nothing was restored yet."""
_MAGIC = b"rlpulse1"
_COUNTER = struct.Struct("<Q")
_BODY = struct.Struct("<Q32sddqdQddqqdqdddQQQQ")
_TEXT_AT = 512
_TEXTS = (1024, 256)
"""Room for where the run is stored, and for its name."""
_AT = 16
_TRIES = 100


class Heartbeat(NamedTuple):
    """What a page says. Times are seconds of the monotonic clock; steps are −1, and losses not a number, as long as there are none."""

    pid: int = 0
    phase: str = ""
    since: float = 0.0
    expected_s: float = 0.0
    """How long the phase should take; 0: nobody knows."""
    step: int = -1
    """The step that ended last."""
    step_at: float = 0.0
    steps: int = 0
    """How many have ended in this process's life."""
    first_at: float = 0.0
    """When the first of them did."""
    loss: float = float("nan")
    sealed: int = -1
    """The last step whose save can be made by others than the trainer."""
    durable: int = -1
    save_since: float = 0.0
    """When the oldest save that is not durable yet was asked for; 0: there is none."""
    restored: int = NOT_YET
    """The step that was restored; −1: a fresh run."""
    restored_at: float = 0.0
    restore_s: float = 0.0
    saves_s: float = 0.0
    """How long the last save took until it was durable."""
    saves: int = 0
    agent: int = 0
    """The process that writes saves."""
    heir: int = 0
    """1: should another rank of this node die, this one can save all that it held. 2: so it can, and is past this step's exchanges."""
    ahead: int = 0
    """How many bytes it held where its script may be left waiting; 0: nowhere, or it is not there yet."""
    url: str = ""
    run: str = ""


def mapped(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """A file that is there already, of that size, to be written. ``OSError`` if it is not, or there is no room for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)  # writing to memory that is not there would be a bus error
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class HeartbeatPage:
    """A writer's end. One process, any of its threads one after the other."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """The file is there already, of ``PAGE_BYTES``. ``OSError`` if it is not, or there is no room for it."""
        self._memory = mapped(path, PAGE_BYTES)
        self._count = 0
        self._texts: tuple[str, ...] = ()

    def write(self, beat: Heartbeat) -> None:
        """All of it."""
        self._count += 2
        _COUNTER.pack_into(self._memory, 8, self._count - 1)
        _BODY.pack_into(self._memory, _AT, beat.pid, beat.phase.encode()[:32], *beat[2:-2])
        if beat[-2:] != self._texts:  # which each step's beat has in common
            self._texts, at = beat[-2:], _TEXT_AT
            for text, room in zip(self._texts, _TEXTS, strict=True):
                data = text.encode(errors="replace")[: room - 1]
                self._memory[at : at + len(data) + 1] = data + b"\0"
                at += room
        self._memory[0:8] = _MAGIC
        _COUNTER.pack_into(self._memory, 8, self._count)


def make_page(path: str | os.PathLike[str]) -> None:
    """An empty one, for a writer to come."""
    with open(path, "wb") as file:
        file.truncate(PAGE_BYTES)


def read_beat(path: str | os.PathLike[str]) -> Heartbeat | None:
    """What is there; None if nothing was written yet, or nothing whole is to be had: the writer died in the midst of it."""
    for _ in range(_TRIES):
        try:
            data = _bytes_of(path)
        except OSError:
            return None
        if len(data) < PAGE_BYTES or data[:8] != _MAGIC:
            return None
        (before,) = _COUNTER.unpack_from(data, 8)
        if before % 2 == 0 and _still(path, before):
            return _decode(data)
    return None


def _bytes_of(path: str | os.PathLike[str]) -> bytes:
    """Read a page. Nothing of what is no regular file, which might have no end."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        return os.read(descriptor, PAGE_BYTES) if stat.S_ISREG(os.fstat(descriptor).st_mode) else b""
    finally:
        os.close(descriptor)


def _still(path: str | os.PathLike[str], count: int) -> bool:
    with open(path, "rb") as file:
        file.seek(8)
        return file.read(8) == _COUNTER.pack(count)


def _decode(data: bytes) -> Heartbeat:
    pid, phase, *rest = _BODY.unpack_from(data, _AT)
    texts, at = [], _TEXT_AT
    for room in _TEXTS:
        texts.append(data[at : at + room].split(b"\0", 1)[0].decode(errors="replace"))
        at += room
    return Heartbeat(pid, phase.rstrip(b"\0").decode(errors="replace"), *rest, *texts)
