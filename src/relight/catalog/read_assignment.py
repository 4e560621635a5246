"""Who of a node reads what: a chunk that several of its ranks need is read by one of them. Worked out by each rank, alike."""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

LENT_RUN_BYTES = 4 << 20
"""Chunks that follow one another, needed by the same ranks, are lent together up to this size."""
LENT_CHUNK_BYTES_MAX = 16 << 20
"""Longer chunks are read by whoever needs them: what is lent lies in memory that is set aside for it."""

PackKey = tuple[int, int]
"""The number of a part, and of a pack in it."""


class LentRun(NamedTuple):
    """Chunks ``first`` to ``last``, one past, of a pack: read by ``owner``, needed by ``takers``, of whom it is one."""

    pack: PackKey
    first: int
    last: int
    offset: int
    length: int
    owner: int
    takers: tuple[int, ...]


def encode_needs(chunks: Iterable[int], count: int) -> bytes:
    """Which of a pack's ``count`` chunks a rank needs, in few bytes."""
    bits = bytearray(-(-count // 8))
    for chunk in chunks:
        bits[chunk >> 3] |= 1 << (chunk & 7)
    return zlib.compress(bits, 1)


def decode_needs(told: bytes, count: int) -> bytes:
    """For each of ``count`` chunks 1 or 0. ``ValueError`` for what ``told_needs`` did not make."""
    size = -(-count // 8)
    try:
        bits = zlib.decompressobj().decompress(told, size + 1)
    except zlib.error as error:
        raise ValueError(str(error)) from error
    if len(bits) != size:
        raise ValueError(f"{len(bits)} bytes for {count} chunks")
    return b"".join(_SPREAD[byte] for byte in bits)[:count]


_SPREAD = [bytes(byte >> bit & 1 for bit in range(8)) for byte in range(256)]


def deal(needs: Mapping[PackKey, Mapping[int, bytes]], lengths: Mapping[PackKey, Sequence[int]]) -> list[LentRun]:
    """What is to be lent. ``needs``: for each pack and rank, which chunks; ``lengths``: of each pack's chunks.

    Each run goes to that of its takers who has the fewest bytes to read so far, what it needs alone counted first.
    """
    loads: dict[int, int] = {rank: 0 for held in needs.values() for rank in held}
    found: list[LentRun] = []
    for key in sorted(needs):
        for first, last, offset, length, takers in _stretches(needs[key], lengths[key]):
            if len(takers) > 1:
                found.append(LentRun(key, first, last, offset, length, -1, takers))
            else:
                loads[takers[0]] += length
    for number, run in enumerate(found):
        owner = min(run.takers, key=lambda rank: (loads[rank], rank))
        loads[owner] += run.length
        found[number] = run._replace(owner=owner)
    return found


def _stretches(needs: Mapping[int, bytes], lengths: Sequence[int]) -> Iterator[tuple[int, int, int, int, tuple[int, ...]]]:
    """``first``, ``last``, ``offset``, ``length``, takers; chunks that are too long to be lent as one taker's each."""
    ranks = sorted(needs)
    offset = begin = first = 0
    held: tuple[int, ...] = ()
    for chunk, (length, *wanted) in enumerate(zip(lengths, *(needs[rank] for rank in ranks), strict=True)):
        takers = tuple(rank for rank, one in zip(ranks, wanted, strict=True) if one)
        alone = length > LENT_CHUNK_BYTES_MAX
        if held and (takers != held or alone or offset + length - begin > LENT_RUN_BYTES):
            yield first, chunk, begin, offset - begin, held
            held = ()
        if alone:
            for rank in takers:
                yield chunk, chunk + 1, offset, length, (rank,)
        elif not held:
            first, begin, held = chunk, offset, takers
        offset += length
    if held:
        yield first, len(lengths), begin, offset - begin, held
