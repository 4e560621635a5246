"""The heartbeat page: one fixed record under a sequence counter.

The writer makes the counter odd, writes the record, and makes the counter even. A reader that finds it odd or changed
reads again.
"""

from __future__ import annotations

import mmap
import os
import stat
import struct
from typing import NamedTuple

PAGE_BYTES = 4096
LATE_AFTER = 3.0
"""A phase is late once it has taken this many times its expected time, and some seconds."""
UPDATING = 2
"""Value of ``Heartbeat.heir`` while the rank is in its optimizer update."""
NOT_YET = -2
"""Value of ``Heartbeat.restored`` before anything was restored."""
_MAGIC = b"rlpulse1"
_COUNTER = struct.Struct("<Q")
_BODY = struct.Struct("<Q32sddqdQddqqdqdddQQQQQd")
_TEXT_AT = 512
_TEXTS = (1024, 256)
"""Bytes reserved for the run's store and for its name."""
_AT = 16
_TRIES = 100


class Heartbeat(NamedTuple):
    """The content of a page. Times are seconds of the monotonic clock. Until there is a value, steps are −1 and losses
    NaN."""

    pid: int = 0
    phase: str = ""
    since: float = 0.0
    expected_s: float = 0.0
    """Seconds that the phase should take; 0 if unknown."""
    step: int = -1
    """The last completed step."""
    step_at: float = 0.0
    steps: int = 0
    """Number of steps that this process has completed."""
    first_at: float = 0.0
    """Time at which the first of them was completed."""
    loss: float = float("nan")
    sealed: int = -1
    """The last step with a save that another process can finish."""
    durable: int = -1
    save_since: float = 0.0
    """Time at which the oldest save that is not durable yet was requested; 0 if there is none."""
    restored: int = NOT_YET
    """The step that was restored; −1: a fresh run."""
    restored_at: float = 0.0
    restore_s: float = 0.0
    saves_s: float = 0.0
    """Seconds that the last save took until it was durable."""
    saves: int = 0
    agent: int = 0
    """The pid of the process that writes saves; 0 if it is this one."""
    heir: int = 0
    """1: if another rank of this node dies, this rank can save the whole state. 2: so it can, and it is past this
    step's collectives."""
    ahead: int = 0
    """Bytes that the process had at ``relight.standby()``; 0 if its script has no such call, or has not reached it."""
    unsupervised: int = 0
    """1: the ranks save and end because the supervisor of some of them, ``relight run``, is gone."""
    paused_s: float = 0.0
    """Seconds that this process has paused between its steps, up to the last completed step, because the supervisor asked for it."""
    url: str = ""
    run: str = ""


def mapped(path: str | os.PathLike[str], size: int) -> mmap.mmap:
    """Map an existing file of ``size`` bytes for writing. Raise ``OSError`` if there is none, or no space for it."""
    descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.posix_fallocate(descriptor, 0, size)  # otherwise a write to an unallocated page would raise SIGBUS
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


class HeartbeatPage:
    """The writer's end of a page. One process; its threads must not write at the same time."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        """Map the existing file of ``PAGE_BYTES``. Raise ``OSError`` if there is none, or no space for it."""
        self._memory = mapped(path, PAGE_BYTES)
        self._count = 0
        self._texts: tuple[str, ...] = ()

    def write(self, beat: Heartbeat) -> None:
        """Write the whole record."""
        self._count += 2
        _COUNTER.pack_into(self._memory, 8, self._count - 1)
        _BODY.pack_into(self._memory, _AT, beat.pid, beat.phase.encode()[:32], *beat[2:-2])
        if beat[-2:] != self._texts:  # the texts rarely change
            self._texts, offset = beat[-2:], _TEXT_AT
            for text, room in zip(self._texts, _TEXTS, strict=True):
                data = text.encode(errors="replace")[: room - 1]
                self._memory[offset : offset + len(data) + 1] = data + b"\0"
                offset += room
        self._memory[0:8] = _MAGIC
        _COUNTER.pack_into(self._memory, 8, self._count)


def make_page(path: str | os.PathLike[str]) -> None:
    """Create an empty page for a later writer."""
    with open(path, "wb") as file:
        file.truncate(PAGE_BYTES)


def read_beat(path: str | os.PathLike[str]) -> Heartbeat | None:
    """Return the page's record; None if nothing was written yet, or the writer died during a write."""
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
    """Read a page. Return nothing if the path is not a regular file, as reading another kind may never end."""
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
    texts, offset = [], _TEXT_AT
    for room in _TEXTS:
        texts.append(data[offset : offset + room].split(b"\0", 1)[0].decode(errors="replace"))
        offset += room
    return Heartbeat(pid, phase.rstrip(b"\0").decode(errors="replace"), *rest, *texts)
