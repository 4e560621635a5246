"""Cutting a pack into chunks: the unit of hashing, reading, repair and reuse."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

CHUNK_BYTES = 4 << 20
"""Longest chunk of a large tensor. BLAKE3 reaches its full speed far below; a read of this size reaches a disk's."""
GROUP_BYTES = 1 << 20
"""Small tensors share a chunk up to this size, so that a hundred thousand of them do not need as many hashes and reads."""


class Extent(NamedTuple):
    """One tensor's bytes in a pack, in file order: its length, and the class that may share a chunk with it."""

    length: int
    group: str


def cut_chunks(
    extents: Iterable[Extent], *, chunk_bytes: int = CHUNK_BYTES, group_bytes: int = GROUP_BYTES
) -> list[int]:
    """Lengths of the chunks that tile consecutive ``extents``.

    A chunk holds a run of one tensor, or several whole tensors of one group. Its length is a multiple of 16 unless it ends a tensor, so
    elements are never cut. Empty tensors need no chunk. Deterministic: equal input gives equal chunks, which is what reuse rests on.
    """
    lengths: list[int] = []
    shared, group = 0, ""
    for length, kind in extents:
        if length == 0:
            continue
        if shared and (kind != group or shared + length > group_bytes):
            lengths.append(shared)
            shared = 0
        if length > group_bytes:
            full, rest = divmod(length, chunk_bytes)
            lengths += [chunk_bytes] * full
            if rest:
                lengths.append(rest)
        else:
            shared, group = shared + length, kind
    if shared:
        lengths.append(shared)
    return lengths
