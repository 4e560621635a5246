"""Mappings of shared memory aligned to huge pages, which Python's ``mmap`` cannot do.

A memfd has ordinary pages of 4 KiB unless the machine's setting ``shmem_enabled`` (mostly ``never``) allows huge ones. A device transfers
ordinary pages one by one, and reads by descriptor copy one at a time. With huge pages, a direct write takes 0.85 of the time, and a read
into live tensors two thirds. ``MADV_COLLAPSE`` (Linux 6.1) creates huge pages regardless of the setting, in mappings aligned to their
size. Without it, pages stay ordinary.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator

_COLLAPSE = 25
_AT_ONCE = 64 << 20
"""Bytes per ``madvise`` call, which cannot be interrupted."""
_HUGE_MAX = 64 << 20
_MAP_NORESERVE, _MAP_FIXED = 0x4000, 0x10
_FAILED = ctypes.c_void_p(-1).value

_libc = ctypes.CDLL(None, use_errno=True)
_mmap, _munmap, _madvise = _libc.mmap, _libc.munmap, _libc.madvise
_mmap.restype = ctypes.c_void_p
_mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
_munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Mapping:
    """A shared mapping of ``size`` bytes of a file. ``view``: all of it. The memory is unmapped when the last view is released."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.size = size
        self.address = _aligned(fd, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        buffer = (ctypes.c_ubyte * size).from_address(self.address)
        self._before_unmap: list[Callable[[], object]] = []
        unmap = weakref.finalize(buffer, _unmap, self.address, size, self._before_unmap)
        unmap.atexit = False  # threads may use the memory until the process ends
        view = memoryview(buffer).cast("B")
        self.view = view if writable else view.toreadonly()
        self.source = view
        """The same bytes for ctypes, which rejects read-only views. Without ``writable``, a write is a segmentation fault."""

    def advise(self, advice: int, start: int, length: int) -> None:
        """Call madvise(2). Raise ``OSError`` if the kernel refuses."""
        if _madvise(self.address + start, length, advice):
            raise _error()

    def before_unmap(self, action: Callable[[], object]) -> None:
        """Call ``action`` just before the memory is unmapped, in the thread that releases the last view. Not at the end of the process."""
        self._before_unmap.append(action)

    def release(self) -> None:
        """Release the view. Raise ``BufferError`` if other views of it exist; these keep the memory mapped."""
        self.view.release()
        self.source.release()


def _unmap(address: int, size: int, before: Iterable[Callable[[], object]]) -> None:
    try:
        for action in before:
            action()
    finally:
        _munmap(address, size)


def make_huge(fd: int, size: int) -> None:
    """Allocate huge pages for an empty memfd, as many as fit and are available. Call before ``fallocate``, which allocates the rest.

    Raise the error of ``fallocate`` if there is no memory. Cost: clearing the memory once. A virtual machine requests each page from the
    host, which takes several times as long, so two threads do it.
    """
    huge = huge_bytes()
    if not huge or size < huge:
        return
    mapping, end = Mapping(fd, size, writable=True), size // huge * huge
    step = max(huge, _AT_ONCE // huge * huge)
    left, stop, failed = iter(range(0, end, step)), threading.Event(), list[OSError]()

    def make(begins: Iterator[int]) -> None:
        for begin in begins:
            if stop.is_set():
                return
            try:
                made = _collapse(mapping, fd, begin, min(step, end - begin), huge)
            except OSError as error:
                made = False
                failed.append(error)
            if not made:
                stop.set()

    make(iter([next(left)]))  # the first call shows whether huge pages are possible at all
    helper = threading.Thread(target=make, args=(left,), name="relight-pages", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread available: this one does all of it
        helper.start()
    try:
        make(left)
    finally:
        stop.set()
        if helper.ident is not None:
            helper.join()
    if failed:
        raise failed[0]


def _collapse(mapping: Mapping, fd: int, begin: int, length: int, huge: int) -> bool:
    """Create huge pages in a range. Return False on failure: an older kernel, or memory too fragmented to try further."""
    # allocate one page of each: MADV_COLLAPSE skips unallocated ranges
    for offset in range(begin, begin + length, huge):
        os.posix_fallocate(fd, offset, mmap.PAGESIZE)
    try:
        mapping.advise(_COLLAPSE, begin, length)
    except OSError:
        return False
    return True


@functools.cache
def huge_bytes() -> int:
    """Return the bytes of a huge page; 0 if there are none."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", encoding="ascii") as file:
            size = int(file.read())
    except (OSError, ValueError):
        return 0
    return size if mmap.PAGESIZE < size <= _HUGE_MAX else 0


def _aligned(fd: int, size: int, protection: int) -> int:
    """Map the file and return the address, aligned to the huge page size if the mapping is large enough for one."""
    huge = huge_bytes()
    if not huge or size < huge:
        return _map(None, size, protection, mmap.MAP_SHARED, fd)
    reserved = _map(None, size + huge, 0, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE, -1)
    address = -(-reserved // huge) * huge
    try:
        _map(address, size, protection, mmap.MAP_SHARED | _MAP_FIXED, fd)
    except OSError:
        _munmap(reserved, size + huge)
        raise
    end = address + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    for begin, length in ((reserved, address - reserved), (end, reserved + size + huge - end)):
        if length > 0:
            _munmap(begin, length)
    return address


def _map(address: int | None, size: int, protection: int, flags: int, fd: int) -> int:
    mapped = _mmap(address, size, protection, flags, fd, 0)
    if mapped is None or mapped == _FAILED:
        raise _error()
    return int(mapped)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
