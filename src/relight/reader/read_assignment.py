"""Assign chunks to ranks of a node: one rank reads a chunk that several ranks need. Every rank computes the same assignment."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

LENT_RUN_BYTES = 4 << 20
"""Largest number of bytes of adjacent chunks, needed by the same ranks, that are lent together."""
LENT_CHUNK_BYTES_MAX = 16 << 20
"""Each rank reads longer chunks itself: lent chunks need reserved shared memory."""

PackKey = tuple[int, int]
"""Index of a part, and of a pack in it."""


class LentRun(NamedTuple):
    """Chunks ``first`` (inclusive) to ``last`` (exclusive) of a pack, read by ``owner``, one of the ``takers`` that need them."""

    pack: PackKey
    first: int
    last: int
    offset: int
    length: int
    owner: int
    takers: tuple[int, ...]


def encode_needs(chunks: Iterable[int], count: int) -> bytes:
    """Encode which of a pack's ``count`` chunks a rank needs, as a compressed bitmap."""
    bits = bytearray(-(-count // 8))
    for chunk in chunks:
        bits[chunk >> 3] |= 1 << (chunk & 7)
    return zlib.compress(bits, 1)


def decode_needs(data: bytes, count: int) -> bytes:
    """Return 1 or 0 for each of ``count`` chunks. Raise ``ValueError`` for bytes that are not from ``encode_needs``."""
    size = -(-count // 8)
    try:
        bits = zlib.decompressobj().decompress(data, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(bits) != size:
        raise ValueError(f"{len(bits)} bytes for {count} chunks")
    return b"".join(_SPREAD[byte] for byte in bits)[:count]


_SPREAD = [bytes(byte >> bit & 1 for bit in range(8)) for byte in range(256)]


def assign_reads(
    needs: Mapping[PackKey, Mapping[int, bytes]], lengths: Mapping[PackKey, Sequence[int]]
) -> list[LentRun]:
    """Return the runs to lend. ``needs``: for each pack and rank, the needed chunks. ``lengths``: the lengths of each pack's chunks.

    Each run is assigned to the taker with the fewest bytes to read so far. What only one rank needs is counted first.
    """
    loads: dict[int, int] = {rank: 0 for by_rank in needs.values() for rank in by_rank}
    runs: list[LentRun] = []
    for key in sorted(needs):
        for first, last, offset, length, takers in _stretches(needs[key], lengths[key]):
            if len(takers) > 1:
                runs.append(LentRun(key, first, last, offset, length, -1, takers))
            else:
                loads[takers[0]] += length
    for number, run in enumerate(runs):
        owner = min(run.takers, key=lambda rank: (loads[rank], rank))
        loads[owner] += run.length
        runs[number] = run._replace(owner=owner)
    return runs


def _stretches(
    needs: Mapping[int, bytes], lengths: Sequence[int]
) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """Yield ``first``, ``last``, ``offset``, ``length`` and takers. A chunk that is too long to be lent is yielded once for each taker."""
    ranks = sorted(needs)
    offset = begin = first = 0
    current: tuple[int, ...] = ()
    for chunk, (length, *wanted_by) in enumerate(zip(lengths, *(needs[rank] for rank in ranks), strict=True)):
        takers = tuple(rank for rank, needed in zip(ranks, wanted_by, strict=True) if needed)
        alone = length > LENT_CHUNK_BYTES_MAX
        if current and (takers != current or alone or offset + length - begin > LENT_RUN_BYTES):
            yield first, chunk, begin, offset - begin, current
            current = ()
        if alone:
            for rank in takers:
                yield chunk, chunk + 1, offset, length, (rank,)
        elif not current:
            first, begin, current = chunk, offset, takers
        offset += length
    if current:
        yield first, len(lengths), begin, offset - begin, current
