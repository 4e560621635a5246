"""A pack that is in memory in its file's layout: two threads write it, other threads hash it and wait for them."""

from __future__ import annotations

import os
import random
import threading
import time

import pytest

from relight.comm import lower_after
from relight.commit import PackPlan
from relight.commit.pack_writer import HASHERS_NICE, WRITES_AT_ONCE, WriteLimits, write_pack
from relight.errors import NoSpace
from relight.format import Digest
from relight.store import page_buffer

SLAB = 1 << 16
CHUNKS = [100_000, 5, 70_000, SLAB, 3 * SLAB, 1234]


class Slow:
    """A writer that counts concurrent writes and keeps the bytes. One write may fail."""

    align = 1

    def __init__(self, size: int, fails_at: int | None = None) -> None:
        self.got, self.fails_at = bytearray(size), fails_at
        self.under_way = self.most = 0
        self.lock = threading.Lock()

    def write_at(self, offset: int, data: memoryview) -> None:
        with self.lock:
            self.under_way += 1
            self.most = max(self.most, self.under_way)
        time.sleep(0.003)
        with self.lock:
            self.under_way -= 1
        if offset == self.fails_at:
            raise NoSpace("full")
        piece = data[: len(self.got) - offset]
        self.got[offset : offset + len(piece)] = piece

    def finish(self, size: int | None = None) -> None: ...

    def abort(self) -> None: ...


def planned(until: object = None) -> tuple[PackPlan, bytes]:
    """A pack in memory, and its bytes."""
    size = sum(CHUNKS)
    image = page_buffer(-(-size // 4096) * 4096)
    image[:size] = random.Random(1).randbytes(size)
    return PackPlan("pack", size, [], CHUNKS, image, until), bytes(image[:size])  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_each_byte_is_written_once_and_each_chunk_hashed(threads: int) -> None:
    """As many pieces as allowed are written at once, never more. The reported progress adds up to the whole."""
    plan, data = planned()
    writer, progress = Slow(plan.size), list[int]()
    hashes = write_pack(writer, plan, slab_bytes=SLAB, pace=WriteLimits(threads, None, progress.append))
    offset = 0
    for length, chunk_hash in zip(CHUNKS, hashes, strict=True):
        assert Digest(data[offset : offset + length]).digest() == chunk_hash
        offset += length
    assert bytes(writer.got) == data
    assert writer.most == min(WRITES_AT_ONCE, threads)
    assert sum(progress) == plan.size and progress.count(SLAB) == len(progress) - 1


def test_nothing_is_written_ahead_of_what_is_filled() -> None:
    """A piece is written only after all of it was filled. Written bytes are reported while the writer waits."""
    filled, progress = [0], list[int]()

    def until(end: int) -> int:
        ends = time.monotonic() + 10
        while sum(progress) < filled[0] and time.monotonic() < ends:
            time.sleep(0.001)
        assert sum(progress) == filled[0]
        filled[0] = end
        return end

    plan, data = planned(until)
    writer = Slow(plan.size)
    taken = writer.write_at

    def write_at(offset: int, piece: memoryview) -> None:
        assert offset + len(piece) <= filled[0] or filled[0] >= plan.size
        taken(offset, piece)

    writer.write_at = write_at  # type: ignore[method-assign]
    write_pack(writer, plan, slab_bytes=SLAB, pace=WriteLimits(2, None, progress.append))
    assert bytes(writer.got) == data


@pytest.mark.parametrize("at", [0, SLAB, 5 * SLAB])
def test_no_thread_reads_the_memory_after_an_error(at: int) -> None:
    """If a piece cannot be written, the write fails, and no thread reads the caller's memory any more."""
    plan, _ = planned()
    with pytest.raises(NoSpace):
        write_pack(Slow(plan.size, fails_at=at), plan, slab_bytes=SLAB)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith(("relight-hash", "relight-write"))]


def test_a_thread_steps_back_by_itself_alone() -> None:
    """The thread's nice value rises, up to 19. The process keeps its own."""
    before, priorities = os.getpriority(os.PRIO_PROCESS, 0), list[int]()

    def work() -> None:
        for by in (HASHERS_NICE, 30):
            lower_after(by)
            priorities.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert priorities == [min(19, before + HASHERS_NICE), 19]
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
