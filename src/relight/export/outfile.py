"""Write a file in any order, from any thread, with direct I/O: in blocks, each written to the disk when it is full.

Runs arrive nearly in the order of the file, so few blocks are open at once. If there is no memory for another block, the
oldest one and its later bytes are written through the page cache. So no page is ever written in both ways at once.
"""

from __future__ import annotations

import os
import threading

from relight.layout.sources import copy_bytes
from relight.store import PAGE, page_buffer
from relight.store.disk import Disk
from relight.store.durable import NewFile, is_memory, translate, write_all

BLOCK_BYTES = 4 << 20
BLOCKS_MAX = 16
"""Largest number of open blocks of all files of an export together."""
DIRECT_FROM_BYTES = 1 << 20


class _Block:
    """A block of a file that is being filled. ``users``: number of threads filling it now. ``runs``: ranges filled so far."""

    __slots__ = ("filled", "memory", "runs", "users")

    def __init__(self, memory: memoryview) -> None:
        self.memory = memory
        self.runs: list[tuple[int, int]] = []
        self.filled = self.users = 0


class ExportBuffers:
    """Block memory shared by all files of an export."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.open: dict[tuple[OutFile, int], _Block] = {}
        self._free: list[memoryview] = []

    def new(self, file: OutFile, number: int) -> tuple[_Block, tuple[OutFile, int, _Block] | None]:
        """Return a new block with one user, and the block that the caller must spill for it, if any. The caller holds the lock."""
        oldest = None
        if len(self.open) >= BLOCKS_MAX:
            key = next((key for key, candidate in self.open.items() if not candidate.users), None)
            if key is not None:
                oldest = (*key, self.open.pop(key))
                key[0].spilled.add(key[1])
        block = self.open[file, number] = _Block(self._free.pop() if self._free else page_buffer(BLOCK_BYTES))
        block.users = 1
        return block, oldest

    def give_back(self, memory: memoryview) -> None:
        """Return a block's memory."""
        with self.lock:
            self._free.append(memory)


class OutFile:
    """A new file at ``path``, ``size`` bytes long."""

    def __init__(self, path: str, size: int, blocks: ExportBuffers) -> None:
        self._path, self._size, self._blocks = path, size, blocks
        self._new = NewFile(
            Disk(), path, size, direct=size >= DIRECT_FROM_BYTES and not is_memory(os.path.dirname(path))
        )
        self._plain = -1
        self.spilled: set[int] = set()
        """Blocks that are written through the page cache. Guarded by the lock."""

    def write_at(self, offset: int, data: memoryview) -> None:
        """Write all of ``data``, each byte of the file once."""
        if self._new.align == 1:
            self._new.write_at(offset, data)
            return
        while data:
            number, within = divmod(offset, BLOCK_BYTES)
            count = min(len(data), BLOCK_BYTES - within)
            self._fill(number, within, data[:count])
            offset, data = offset + count, data[count:]

    def _fill(self, number: int, within: int, data: memoryview) -> None:
        blocks, spill = self._blocks, None
        with blocks.lock:
            block = blocks.open.get((self, number))
            if block is not None:
                block.users += 1
            elif number not in self.spilled:
                block, spill = blocks.new(self, number)
        if spill is not None:
            spill[0].spill(spill[1], spill[2])
        if block is None:
            self._through_cache(number * BLOCK_BYTES + within, data)
            return
        copy_bytes(data, block.memory[within : within + len(data)])
        length = min(BLOCK_BYTES, self._size - number * BLOCK_BYTES)
        with blocks.lock:
            block.users -= 1
            block.runs.append((within, len(data)))
            block.filled += len(data)
            full = block.filled == length
            if full:
                del blocks.open[self, number]
        if full:
            self._new.write_at(number * BLOCK_BYTES, block.memory[: -(-length // PAGE) * PAGE])
            blocks.give_back(block.memory)

    def spill(self, number: int, block: _Block) -> None:
        """Write the filled ranges of a block through the page cache."""
        for within, length in block.runs:
            self._through_cache(number * BLOCK_BYTES + within, block.memory[within : within + length])
        self._blocks.give_back(block.memory)

    def _through_cache(self, offset: int, data: memoryview) -> None:
        try:
            with self._blocks.lock:
                if self._plain < 0:
                    self._plain = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
            write_all(self._plain, data, offset)
        except OSError as error:
            raise translate(error, "writing a file", self._path) from error

    def patch(self, offset: int, data: bytes) -> None:
        """Overwrite bytes. No other thread may be writing."""
        self._flush()
        if self._new.align == 1:
            self._new.write_at(offset, memoryview(data))
        else:
            self._through_cache(offset, memoryview(data))

    def _flush(self) -> None:
        with self._blocks.lock:
            open_blocks = [(key, block) for key, block in self._blocks.open.items() if key[0] is self]
            for key, _ in open_blocks:
                del self._blocks.open[key]
                self.spilled.add(key[1])
        for key, block in open_blocks:
            self.spill(key[1], block)

    def finish(self) -> None:
        """Make the file durable and close it. After an error, call ``abort``."""
        self._flush()
        self._new.finish()  # also makes the bytes in the page cache durable: it is the same file
        self._close()

    def abort(self) -> None:
        """Close and remove. Never raises."""
        self._close()
        self._new.abort()

    def _close(self) -> None:
        if self._plain >= 0:
            os.close(self._plain)
            self._plain = -1
