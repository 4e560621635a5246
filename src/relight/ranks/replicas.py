"""Compare replicas. A replicated tensor is written once; if a rank's copy differed, that rank would train another model
unnoticed.

Each save compares checksums over a part of the replicated tensors, in turn, which keeps the cost low. The first save
with a layout compares all of them. What differed is compared at each save until it is equal again.

The checksums are sums of 64-bit words: any single change alters them, for every dtype.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from relight.capture.sharded import ShardingOf
from relight.capture.tensors import TensorSource
from relight.decode import from_msgpack
from relight.format import Digest
from relight.layout import Item
from relight.layout.rank_tables import TensorOwnership
from relight.layout.shards import LocalBox
from relight.layout.sources import Source, copy_from

CHECKED_BYTES = 32 << 20
"""Bytes of replicated tensors that each save after the first compares."""
_MASK = (1 << 64) - 1
_SLAB_BYTES = 16 << 20


class ReplicatedPiece(NamedTuple):
    """A piece that other ranks have as well: its item and its length in bytes."""

    item: int
    piece: LocalBox
    length: int


class CopyRange(NamedTuple):
    """Bytes ``start`` to ``end`` of a copy."""

    copy: ReplicatedPiece
    start: int
    end: int


class ReplicaDifference(NamedTuple):
    """A tensor that differs between its replicas. ``odd``: the ranks that differ from the majority; all ranks if there
    is no majority."""

    name: str
    odd: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        odd, rest = ", ".join(map(str, self.odd)), [rank for rank in self.ranks if rank not in self.odd]
        if not rest:
            return f"{self.name} is not the same on ranks {odd}"
        return f"{self.name} on rank {odd} is not what it is on {', '.join(map(str, rest[:8]))}"


class Comparison(NamedTuple):
    """The ranges that one save compared, by key. ``unequal``: for each set of ranks that differ, the encoded names and sums
    of each rank."""

    chosen: Mapping[bytes, Sequence[CopyRange]]
    unequal: Mapping[bytes, Mapping[int, bytes]]


class Replicas:
    """The pieces that one rank shares with other ranks, by set of ranks. All ranks of a set compute the same 8-byte key
    for it."""

    def __init__(self, roster: TensorOwnership, rank: int) -> None:
        self._lines: dict[bytes, list[ReplicatedPiece]] = defaultdict(list)
        entries = roster.tables[roster.table_of[rank]].entries
        keys: dict[tuple[int, ...], bytes] = {}
        for index, piece, holders in roster.shared(rank):
            if holders not in keys:
                keys[holders] = Digest(repr(holders).encode()).digest()[:8]
            self._lines[keys[holders]].append(ReplicatedPiece(index, piece, piece.box.elements * entries[index].weight))
        self._next: dict[bytes, int] = dict.fromkeys(self._lines, 0)
        self._whole = True
        self._unequal: dict[bytes, list[CopyRange]] = {}
        """Ranges that differed when they were last compared."""
        self._compared: Comparison | None = None
        """The last comparison, until the next ranges are chosen by it."""

    def choose(self) -> dict[bytes, list[CopyRange]]:
        """Return the byte ranges to compare at this save, by key: everything at first. Later, the ranges that differed
        at the save before, and the next range of each set's pieces. The same ranges until ``advance()``."""
        if self._compared is not None:
            self._next, self._unequal = self._after(self._compared)
            self._whole, self._compared = False, None
        chosen = {}
        for key, line in self._lines.items():
            known = self._unequal.get(key, [])
            following = _between(line, *self._range(key, line))
            chosen[key] = [*known, *(each for each in following if not any(_covers(wide, each) for wide in known))]
        return chosen

    def advance(self, comparison: Comparison) -> None:
        """Choose later ranges from now on. Call it once all ranks have the sums of these: otherwise ranks would compare
        different ranges at the next save. It only keeps a reference, so that it cannot fail on one rank."""
        self._compared = comparison

    def _after(self, comparison: Comparison) -> tuple[dict[bytes, int], dict[bytes, list[CopyRange]]]:
        """Return where the next ranges begin, and the ranges that differed."""
        begins = {key: self._range(key, line)[1] % max(1, _length(line)) for key, line in self._lines.items()}
        unequal = {}
        for key, by_rank in comparison.unequal.items():
            if key in comparison.chosen:
                places = zip(*(named_sums(data) for data in by_rank.values()), strict=True)
                differs = [len({value for _, value in place}) > 1 for place in places]
                unequal[key] = [each for each, odd in zip(comparison.chosen[key], differs, strict=True) if odd]
        return begins, unequal

    def _range(self, key: bytes, line: Sequence[ReplicatedPiece]) -> tuple[int, int]:
        total = _length(line)
        budget = total if self._whole else max(1, CHECKED_BYTES // len(self._lines))
        begin = 0 if self._whole else self._next[key] % max(1, total)
        return begin, min(total, begin + budget)


def _length(line: Sequence[ReplicatedPiece]) -> int:
    return sum(copy.length for copy in line)


def _between(line: Sequence[ReplicatedPiece], begin: int, end: int) -> list[CopyRange]:
    ranges, offset = [], 0
    for copy in line:
        first, last = max(begin - offset, 0) // 16 * 16, min(end - offset, copy.length)
        if first < last:
            ranges.append(CopyRange(copy, first, last))
        offset += copy.length
    return ranges


def _covers(wide: CopyRange, narrow: CopyRange) -> bool:
    return wide.copy is narrow.copy and wide.start <= narrow.start and narrow.end <= wide.end


def named_sums(data: bytes) -> list[tuple[str, int]]:
    """Return the names and sums of the ranges that a rank compared, from its message."""
    return from_msgpack(data, list[tuple[str, int]])


def sums(stretches: Sequence[CopyRange], items: Sequence[Item], spreads: Mapping[int, ShardingOf]) -> list[int]:
    """Return the sum of each range: 64-bit words, the last one padded with zeros. A contiguous tensor is summed on its
    own device, any other through a buffer in host memory.
    """
    return [_sum(_source(stretch.copy, items, spreads), stretch.start, stretch.end) for stretch in stretches]


def _sum(source: Source, start: int, end: int) -> int:
    tensor = source.tensor.detach() if isinstance(source, TensorSource) else None
    if tensor is not None and tensor.is_contiguous():
        data = tensor.reshape(-1).view(torch.uint8)[start:end]
        if data.storage_offset() % 8 == 0:
            return _added(data)
    total = 0
    for offset in range(start, end, _SLAB_BYTES):
        slab = bytearray(min(_SLAB_BYTES, end - offset))
        copy_from(source, offset, memoryview(slab))
        total += _added(torch.frombuffer(slab, dtype=torch.uint8))
    return total & _MASK


def _source(copy: ReplicatedPiece, items: Sequence[Item], spreads: Mapping[int, ShardingOf]) -> Source:
    spread = spreads.get(copy.item)
    return items[copy.item].source if spread is None else TensorSource(spread.held(copy.piece).detach())


def _added(data: torch.Tensor) -> int:
    """Return the sum of bytes that start at an 8-byte boundary."""
    whole = data.numel() // 8 * 8
    total = int(data[:whole].view(torch.int64).sum()) if whole else 0
    return (total + int.from_bytes(bytes(data[whole:].cpu().tolist()), "little")) & _MASK


def combined(values: Sequence[int]) -> bytes:
    """Return one 8-byte digest of many sums."""
    return Digest(b"".join(value.to_bytes(8, "little") for value in values)).digest()[:8]


def differing(words: Sequence[Mapping[bytes, bytes]]) -> list[bytes]:
    """Return the keys of sets with ranks that have different digests. ``words``: every rank's digests by key."""
    seen: dict[bytes, bytes] = {}
    odd = []
    for digests in words:
        for key, digest in digests.items():
            if seen.setdefault(key, digest) != digest and key not in odd:
                odd.append(key)
    return sorted(odd)


def differences(by_rank: Mapping[int, Sequence[tuple[str, int]]]) -> list[ReplicaDifference]:
    """Return the tensors that differ, and their ranks. ``by_rank``: names and sums of one set's ranges, in the same
    order on all ranks."""
    different = []
    ranks = tuple(sorted(by_rank))
    for place in zip(*(by_rank[rank] for rank in ranks), strict=True):
        counts = Counter(value for _, value in place)
        if len(counts) == 1:
            continue
        (most, times), *others = counts.most_common()
        clear = not others or others[0][1] < times
        odd = tuple(rank for rank, (_, value) in zip(ranks, place, strict=True) if value != most) if clear else ranks
        different.append(ReplicaDifference(place[0][0], odd, ranks))
    return different
