"""Which bytes of a checkpoint's tensors another checkpoint has as well, by the hashes of their chunks."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable
from itertools import accumulate

from relight.format import Part, Tensor

Chunk = tuple[int, int, bytes]
"""A chunk with bytes of a stored tensor: its start, counted from the tensor's first byte (negative if it begins before), length, hash."""
Key = tuple[str, str, tuple[int, ...], object]
"""Identifies a stored tensor, or a rank's piece of it, across checkpoints: name, dtype, global shape, box."""
ChunkMap = dict[Key, frozenset[Chunk]]


def key_of(tensor: Tensor) -> Key:
    """Return the key of a part's tensor."""
    return tensor.name, tensor.dtype, tuple(tensor.shape), tensor.box


def chunk_map(part: Part, indices: Iterable[int]) -> ChunkMap:
    """Return the chunks of those tensors of a part."""
    starts = [[0, *accumulate(length for length, _ in pack.chunks)] for pack in part.packs]
    chunks_by_key: ChunkMap = {}
    for index in indices:
        tensor = part.tensors[index]
        if not tensor.length:
            continue
        pack_starts, chunks = starts[tensor.pack], part.packs[tensor.pack].chunks
        first = bisect_right(pack_starts, tensor.offset) - 1
        last = bisect_right(pack_starts, tensor.offset + tensor.length - 1) - 1
        chunks_by_key[key_of(tensor)] = frozenset(
            (pack_starts[number] - tensor.offset, *chunks[number]) for number in range(first, last + 1)
        )
    return chunks_by_key


class UnchangedRanges:
    """Ranges of a stored tensor's bytes. Adjacent ones are joined."""

    def __init__(self, tensor: Tensor, now: frozenset[Chunk], before: frozenset[Chunk]) -> None:
        """``now``: the tensor's chunks in the checkpoint to read. ``before``: those of the checkpoint that the live tensor has."""
        self._starts: list[int] = []
        self._ends: list[int] = []
        for start, length, _ in sorted(now & before):
            end = min(start + length, tensor.length)
            if self._ends and self._ends[-1] == max(start, 0):
                self._ends[-1] = end
            else:
                self._starts.append(max(start, 0))
                self._ends.append(end)

    def cover(self, start: int, end: int) -> bool:
        """Return whether all bytes from ``start`` to ``end`` are unchanged."""
        place = bisect_right(self._starts, start) - 1
        return place >= 0 and end <= self._ends[place]
