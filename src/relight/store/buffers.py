"""Buffers for direct I/O."""

from __future__ import annotations

import contextlib
import ctypes
import mmap

HUGE = 2 << 20


def page_buffer(size: int) -> memoryview:
    """Return ``size`` zero bytes, page-aligned and writable. The memory is freed with its last view.

    Devices transfer physically contiguous memory in one piece. So this uses huge pages where available, and touches every page in order.
    Pages that are first touched by a device transfer are scattered; reading into them took twice as long.
    """
    whole = -(-size // HUGE) * HUGE if size >= HUGE else -(-max(size, 1) // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, whole, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if size >= HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        with contextlib.suppress(OSError):  # a kernel without huge pages uses ordinary ones
            memory.madvise(mmap.MADV_HUGEPAGE)
    ctypes.memset(ctypes.addressof(ctypes.c_char.from_buffer(memory)), 0, whole)
    return memoryview(memory)[:size]
