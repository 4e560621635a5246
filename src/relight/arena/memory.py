"""Memory that outlives the process that fills it: a memfd, allocated in advance, mapped by every process with the descriptor.

A memfd does not depend on the size of ``/dev/shm``, leaves no file, and is freed with its last descriptor and mapping. Its pages are
allocated (``fallocate``) before the first write. So a lack of memory is an error here, not a SIGBUS during a copy.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

from relight.arena.mapping import Mapping, make_huge
from relight.errors import NoSpace, UnsafeContent
from relight.units import size_text

PAGE = mmap.PAGESIZE
_POPULATE_READ, _POPULATE_WRITE = 22, 23
_SEAL_FUTURE_WRITE = 0x10
"""``F_SEAL_FUTURE_WRITE``: Python has no name for it."""
_CGROUP = "/sys/fs/cgroup"
_HEADROOM = 256 << 20
_NO_LIMIT = 1 << 60
"""Limits from this on mean no limit: version 1 reports slightly less than 2**63 then."""


class SharedMapping:
    """A mapped memfd. It owns the descriptor. ``close``, or garbage collection, releases descriptor and mapping."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.fd, self.size = fd, size
        self._let_go = weakref.finalize(self, os.close, fd)
        self._map = Mapping(fd, size, writable=writable)
        with contextlib.suppress(OSError):
            self._map.advise(mmap.MADV_DONTDUMP, 0, size)
        self.view, self.source = self._map.view, self._map.source

    @property
    def address(self) -> int:
        """Return the address of the first byte in this process."""
        return self._map.address

    def populate(self, start: int = 0, length: int | None = None) -> None:
        """Fill this process's page table now, instead of one page fault at a time. A hint: no effect on kernels without it."""
        length = self.size - start if length is None else length
        for advice in (_POPULATE_WRITE, _POPULATE_READ):
            try:
                self._map.advise(advice, start, length)
                return
            except OSError:
                continue

    def before_unmap(self, action: Callable[[], object]) -> None:
        """Call ``action`` just before the memory is unmapped, in the thread that releases the last view. Not at the end of the process."""
        self._map.before_unmap(action)

    def close(self) -> None:
        """Close the descriptor, and unmap the memory unless views of it exist."""
        with contextlib.suppress(BufferError):
            self._map.release()
        self.fd = -1
        self._let_go()


def allocate(size: int, name: str = "relight") -> int:
    """Return the descriptor of a new, fully allocated memfd of ``size`` bytes. Raise ``NoSpace``, with numbers, if memory is short."""
    room = room_for(size)
    if room is not None:
        raise NoSpace(
            room,
            where="shared memory",
            hint="relight.Limits(memory=…) bounds it; without room saves are made by the trainer",
        )
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, size)
        make_huge(fd, size)
        os.posix_fallocate(fd, 0, size)
    except OSError as error:
        os.close(fd)
        if error.errno in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT, errno.EFBIG):
            raise NoSpace(
                f"{size_text(size)} of shared memory could not be allocated: {error.strerror}", where="shared memory"
            ) from error
        raise
    return fd


def reading(fd: int) -> int:
    """Return a read-only descriptor of the same memory. The caller closes it."""
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def freeze(fd: int) -> None:
    """Forbid writes through any descriptor or new mapping. Existing mappings stay writable. No effect before Linux 5.1."""
    with contextlib.suppress(OSError):
        fcntl.fcntl(
            fd, fcntl.F_ADD_SEALS, _SEAL_FUTURE_WRITE | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
        )


def is_frozen(fd: int) -> bool:
    """Return whether ``freeze`` was called for this memory, so that no process can map it for writing any more."""
    with contextlib.suppress(OSError):
        return bool(fcntl.fcntl(fd, fcntl.F_GET_SEALS) & _SEAL_FUTURE_WRITE)
    return False


def adopt(fd: int, *, writable: bool) -> SharedMapping:
    """Map a memfd from another process. Takes ownership of the descriptor."""
    size = os.fstat(fd).st_size
    if size < PAGE or size % PAGE:
        os.close(fd)
        raise UnsafeContent(f"{size} bytes are not a valid arena")
    return SharedMapping(fd, size, writable=writable)


def room_for(size: int) -> str | None:
    """Return why ``size`` more bytes would exceed the memory of this machine or cgroup; None if they fit."""
    available = _meminfo("MemAvailable")
    if available is not None and size > available - _HEADROOM:
        return f"{size_text(size)} are wanted, the machine has {size_text(available)} available"
    left = _cgroup_left()
    if left is not None and size > left - _HEADROOM // 4:
        return f"{size_text(size)} are wanted, the memory limit of this cgroup leaves {size_text(left)}"
    return None


def available_bytes() -> int | None:
    """Return the available memory in bytes, of the machine or within the cgroup's limit; None if both are unknown."""
    candidates = [available for available in (_meminfo("MemAvailable"), _cgroup_left()) if available is not None]
    return max(0, min(candidates)) if candidates else None


def _meminfo(key: str) -> int | None:
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith(key + ":"):
                    return int(line.split()[1]) << 10
    except (OSError, ValueError):
        pass
    return None


class _Control(NamedTuple):
    """Files of a cgroup version."""

    root: str
    limit: str
    used: str
    droppable: tuple[str, ...]


_CONTROLS = {
    "0::": _Control(_CGROUP, "memory.max", "memory.current", ("active_file ", "inactive_file ")),
    "memory:": _Control(
        f"{_CGROUP}/memory",
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
        ("total_active_file ", "total_inactive_file "),
    ),
}
"""Cgroup versions 2 and 1, by the prefix of their line in ``/proc/self/cgroup``."""


def _cgroup_left() -> int | None:
    """Return the bytes that the tightest cgroup limit of this process leaves. Droppable page cache counts as free."""
    try:
        with open("/proc/self/cgroup", encoding="ascii") as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    remaining = [
        left
        for mark, control in _CONTROLS.items()
        for line in lines
        if line.startswith(mark) or line.partition(":")[2].startswith(mark)
        if (left := _room_in(control, line.split(":", 2)[2])) is not None
    ]
    return min(remaining, default=None)


def _room_in(control: _Control, own: str) -> int | None:
    left: int | None = None
    path = own.rstrip("/")
    while True:
        folder = control.root + path
        try:
            limit = _number(f"{folder}/{control.limit}")
            if limit is not None and limit < _NO_LIMIT:
                used = _number(f"{folder}/{control.used}") or 0
                here = limit - used + _droppable(f"{folder}/memory.stat", control.droppable)
                left = here if left is None else min(left, here)
        except OSError:
            pass
        if not path:
            return left
        path = path.rpartition("/")[0]


def _number(path: str) -> int | None:
    with open(path, encoding="ascii") as file:
        text = file.read().strip()
    return int(text) if text.isdigit() else None


def _droppable(path: str, lines: tuple[str, ...]) -> int:
    with contextlib.suppress(OSError, ValueError), open(path, encoding="ascii") as file:
        return sum(int(line.split()[1]) for line in file if line.startswith(lines))
    return 0
