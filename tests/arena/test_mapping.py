"""Shared memory of huge pages: its address alignment, its allocation, and its lifetime while views of it exist."""

from __future__ import annotations

import ctypes
import errno
import gc
import mmap
import os
from pathlib import Path

import pytest
from tests.descriptors import open_descriptors

from relight.arena import SharedMapping, adopt, allocate, mapping
from relight.arena.mapping import Mapping, huge_bytes, make_huge
from relight.errors import NoSpace
from relight.layout.sources import address_of

HUGE = huge_bytes() or 2 << 20
PAGE = mmap.PAGESIZE
SIZES = [PAGE, HUGE - PAGE, HUGE, HUGE + PAGE, 3 * HUGE + 5 * PAGE]


def mapped(address: int) -> bool:
    """Whether some mapping of this process holds that address."""
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        begin, end = (int(address, 16) for address in line.split(" ", 1)[0].split("-"))
        if begin <= address < end:
            return not line.split()[1].startswith("---")
    return False


@pytest.mark.parametrize("size", SIZES)
def test_all_memory_is_allocated_and_shared(size: int) -> None:
    """Every byte is allocated before it is written. Another mapping of the memory sees all writes."""
    fd = allocate(size)
    assert os.fstat(fd).st_blocks * 512 >= size
    ours, theirs = SharedMapping(fd, size, writable=True), adopt(os.dup(fd), writable=False)
    ours.populate()
    ours.view[0], ours.view[size - 1] = 7, 9
    assert (theirs.view[0], theirs.view[size - 1], len(theirs.view)) == (7, 9, size)
    assert theirs.view.readonly
    assert not huge_bytes() or size < HUGE or ctypes.addressof(ctypes.c_char.from_buffer(ours.view)) % HUGE == 0


def test_pages_are_huge_if_the_kernel_supports_it() -> None:
    """Whole huge pages are used where they fit. Otherwise a write past the page cache has thousands of small pieces."""
    size = 4 * HUGE + PAGE
    memory = SharedMapping(allocate(size), size, writable=True)
    memory.populate()
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
    maps = Path("/proc/self/smaps").read_text(encoding="ascii").split(f"{address:x}-", 1)[1]
    huge = next(int(line.split()[1]) << 10 for line in maps.splitlines() if line.startswith("ShmemPmdMapped"))
    if not huge:
        pytest.skip("this kernel collapses no shared memory")
    assert huge == 4 * HUGE


def test_memory_stays_mapped_while_a_view_of_it_exists() -> None:
    """A remaining view keeps a closed mapping. The memory is unmapped with the last view."""
    size = HUGE + PAGE
    memory = SharedMapping(allocate(size), size, writable=True)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory.view))
    kept = memory.view[PAGE : 2 * PAGE]
    memory.close()
    kept[0] = 3
    assert mapped(address)
    del kept, memory
    gc.collect()
    assert not mapped(address)
    assert not mapped(address + size - 1)


def test_nothing_of_the_reserved_addresses_is_left() -> None:
    """Address space that was reserved to align a mapping to a huge page is released."""
    fd = allocate(HUGE)
    before = len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines())
    mappings = [Mapping(fd, HUGE, writable=True) for _ in range(60)]
    # others may map as well
    assert len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines()) <= before + 60 + 30
    mappings.clear()
    gc.collect()
    assert len(Path("/proc/self/maps").read_text(encoding="ascii").splitlines()) <= before + 30
    os.close(fd)


def test_a_kernel_without_huge_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """If the kernel refuses huge pages, all memory is allocated in ordinary pages. The refusal is remembered."""
    asked = []

    def refuse(*arguments: int) -> int:
        asked.append(arguments)
        ctypes.set_errno(errno.EINVAL)
        return -1

    monkeypatch.setattr(mapping, "_madvise", refuse)
    size = 200 * HUGE
    fd = allocate(size)
    assert os.fstat(fd).st_blocks * 512 >= size
    assert not huge_bytes() or len(asked) == 1
    os.close(fd)


def test_a_full_memory_raises_no_space(monkeypatch: pytest.MonkeyPatch) -> None:
    """If shared memory is full, ``allocate`` raises ``NoSpace`` and leaves no descriptor open."""

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "no space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(NoSpace, match="shared memory"):
        allocate(4 * HUGE, "no-room-here")
    assert not open_descriptors("no-room-here")


def test_no_huge_pages_no_alignment(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel built without them: as ever."""
    monkeypatch.setattr(mapping, "huge_bytes", lambda: 0)
    size = 3 * HUGE
    fd = os.memfd_create("x")
    os.ftruncate(fd, size)
    make_huge(fd, size)
    assert os.fstat(fd).st_blocks == 0
    Mapping(fd, size, writable=True).view[size - 1] = 1
    with pytest.raises(OSError, match=os.strerror(errno.EBADF)):
        Mapping(-1, size, writable=False)
    os.close(fd)


def test_actions_before_unmapping_run_once_when_the_last_view_is_gone() -> None:
    """The actions see mapped memory, because page locks must be released before another mapping can get the address."""
    size = 1 << 20
    memory = SharedMapping(allocate(size), size, writable=True)
    address, seen = address_of(memory.view), list[int]()
    memory.view[7] = 42
    memory.before_unmap(lambda: seen.append(ctypes.c_ubyte.from_address(address + 7).value))
    kept = memory.view[:16]
    memory.close()
    assert seen == [], "a view keeps the memory mapped"
    del memory
    gc.collect()
    assert seen == []
    del kept
    gc.collect()
    assert seen == [42]
