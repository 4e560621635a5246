"""Memory for direct input and output."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE = 2 << 20


def page_buffer(size: int) -> memoryview:
    """``size`` bytes of zeros, page-aligned, writable; freed with the last view of them.

    The device is handed memory in pieces that are contiguous, so these are made to be: huge pages where the system gives them, and every
    page touched here, in order. Pages that a device is the first to touch come one by one from all over; reading into them took twice
    as long.
    """
    whole = -(-size // HUGE) * HUGE if size >= HUGE else -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel built without them has ordinary pages
            memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, whole)
    return memoryview(memory)[:size]
