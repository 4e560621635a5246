"""Mappings of shared memory that begin where a huge page may begin, which Python's own cannot be asked for.

A memfd has ordinary pages unless the machine's settings say otherwise (``shmem_enabled``, mostly ``never``), of 4 KiB each. The device is
handed them one by one, and whoever reads by descriptor is given one at a time: a direct write out of huge pages takes 0.85 of the time,
reading them into live tensors two thirds. ``MADV_COLLAPSE`` (Linux 6.1) makes them whatever the settings, of what is mapped at a
multiple of their size. Where it does not, pages stay as they were.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import mmap
import os
import threading
import weakref
from collections.abc import Iterator

_COLLAPSE = 25
_AT_ONCE = 64 << 20
"""So much is made of huge pages by one call: it cannot be interrupted."""
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
    """``size`` bytes of a file, shared. ``view`` is all of it; the memory is unmapped with the last view of it that anybody holds."""

    def __init__(self, fd: int, size: int, *, writable: bool) -> None:
        self.size = size
        self.address = _aligned(fd, size, mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0))
        held = (ctypes.c_ubyte * size).from_address(self.address)
        unmap = weakref.finalize(held, _munmap, self.address, size)
        unmap.atexit = False  # threads may be at it until the very end
        view = memoryview(held).cast("B")
        self.view = view if writable else view.toreadonly()
        self.source = view
        """The same bytes for ctypes, which takes no read-only view. If it is not ``writable``, writing to it is a segmentation fault."""

    def advise(self, advice: int, start: int, length: int) -> None:
        """madvise(2). ``OSError`` if the kernel does not take it."""
        if _madvise(self.address + start, length, advice):
            raise _error()

    def release(self) -> None:
        """Hold it no longer. ``BufferError`` if somebody made views of the view, who then hold it."""
        self.view.release()
        self.source.release()


def make_huge(fd: int, size: int) -> None:
    """Have an empty memfd's pages be huge ones, as many as fit and can be had. Call before ``fallocate``, which sees to the rest.

    Raises what ``fallocate`` raises if there is no room. Cost: clearing the memory, once; on a virtual machine asking the host for it, page
    by page, which takes several times as long: so two threads do it.
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

    make(iter([next(left)]))  # where it cannot be done at all one look says so
    helper = threading.Thread(target=make, args=(left,), name="relight-pages", daemon=True)
    with contextlib.suppress(RuntimeError):  # no thread is to be had: one makes all of it
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
    """Make huge pages of some. False if they cannot be made: an older kernel, or memory too scattered to go on trying."""
    for at in range(begin, begin + length, huge):  # one page of each: what is nowhere allocated is not made into anything
        os.posix_fallocate(fd, at, mmap.PAGESIZE)
    try:
        mapping.advise(_COLLAPSE, begin, length)
    except OSError:
        return False
    return True


@functools.cache
def huge_bytes() -> int:
    """A huge page's; 0 if there are none."""
    try:
        with open("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size", encoding="ascii") as file:
            found = int(file.read())
    except (OSError, ValueError):
        return 0
    return found if mmap.PAGESIZE < found <= _HUGE_MAX else 0


def _aligned(fd: int, size: int, protection: int) -> int:
    """The address of a mapping, at a multiple of a huge page's size if it has room for one."""
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
    found = _mmap(address, size, protection, flags, fd, 0)
    if found is None or found == _FAILED:
        raise _error()
    return int(found)


def _error() -> OSError:
    code = ctypes.get_errno()
    return OSError(code, os.strerror(code))
