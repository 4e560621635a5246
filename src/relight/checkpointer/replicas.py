"""Are replicas equal? What several ranks hold is written once; a rank whose copy differs trains another model, and nobody would see it.

Each save compares sums over some of what is replicated, in turns, so that it costs little and all of it comes up again and again; the first
save with a layout compares all of it. Sums of 64-bit words: any single change alters them, whatever the dtype.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch

from relight.capture.sharded import ShardingOf
from relight.capture.tensors import TensorSource
from relight.format import Digest
from relight.layout import Item
from relight.layout.rank_tables import TensorOwnership
from relight.layout.shards import LocalBox
from relight.layout.sources import Source, copy_from

CHECKED_BYTES = 32 << 20
"""How much of what is replicated each save compares, besides the first."""
_MASK = (1 << 64) - 1
_SLAB_BYTES = 16 << 20


class ReplicatedPiece(NamedTuple):
    """A piece that other ranks hold as well: of which item, and its bytes."""

    item: int
    piece: LocalBox
    length: int


class CopyRange(NamedTuple):
    """Bytes ``start`` to ``end`` of a copy."""

    copy: ReplicatedPiece
    start: int
    end: int


class ReplicaDifference(NamedTuple):
    """A tensor that is not the same on all ranks that should hold the same. ``odd``: those that differ from most; all, if there is no
    most.
    """

    name: str
    odd: tuple[int, ...]
    ranks: tuple[int, ...]

    def __str__(self) -> str:
        odd, rest = ", ".join(map(str, self.odd)), [rank for rank in self.ranks if rank not in self.odd]
        if not rest:
            return f"{self.name} is not the same on ranks {odd}"
        return f"{self.name} on rank {odd} is not what it is on {', '.join(map(str, rest[:8]))}"


class Replicas:
    """What one rank shares with others, set by set of ranks. Sets go by a key of 8 bytes that all of their ranks come to."""

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

    def choose(self) -> dict[bytes, list[CopyRange]]:
        """What to compare at this save: everything at first, then a stretch of each line, on from the last one's end."""
        chosen = {}
        for key, line in self._lines.items():
            total = sum(copy.length for copy in line)
            budget = total if self._whole else max(1, CHECKED_BYTES // len(self._lines))
            begin = 0 if self._whole else self._next[key] % max(1, total)
            end = min(total, begin + budget)
            self._next[key] = end % max(1, total)
            chosen[key] = _between(line, begin, end)
        self._whole = False
        return chosen


def _between(line: Sequence[ReplicatedPiece], begin: int, end: int) -> list[CopyRange]:
    found, at = [], 0
    for copy in line:
        first, last = max(begin - at, 0) // 16 * 16, min(end - at, copy.length)
        if first < last:
            found.append(CopyRange(copy, first, last))
        at += copy.length
    return found


def sums(stretches: Sequence[CopyRange], items: Sequence[Item], spreads: Mapping[int, ShardingOf]) -> list[int]:
    """The sum of each stretch: 64-bit words, added up, the last one filled up with zeros. In the memory's own device where it lies in order
    there, else by way of a slab.
    """
    return [_sum(_source(one.copy, items, spreads), one.start, one.end) for one in stretches]


def _sum(source: Source, start: int, end: int) -> int:
    tensor = source.tensor.detach() if isinstance(source, TensorSource) else None
    if tensor is not None and tensor.is_contiguous():
        data = tensor.reshape(-1).view(torch.uint8)[start:end]
        if data.storage_offset() % 8 == 0:
            return _added(data)
    total = 0
    for at in range(start, end, _SLAB_BYTES):
        slab = bytearray(min(_SLAB_BYTES, end - at))
        copy_from(source, at, memoryview(slab))
        total += _added(torch.frombuffer(slab, dtype=torch.uint8))
    return total & _MASK


def _source(copy: ReplicatedPiece, items: Sequence[Item], spreads: Mapping[int, ShardingOf]) -> Source:
    spread = spreads.get(copy.item)
    return items[copy.item].source if spread is None else TensorSource(spread.held(copy.piece).detach())


def _added(data: torch.Tensor) -> int:
    """Of bytes whose address is one of a word."""
    whole = data.numel() // 8 * 8
    total = int(data[:whole].view(torch.int64).sum()) if whole else 0
    return (total + int.from_bytes(bytes(data[whole:].cpu().tolist()), "little")) & _MASK


def combined(found: Sequence[int]) -> bytes:
    """One word for many sums."""
    return Digest(b"".join(one.to_bytes(8, "little") for one in found)).digest()[:8]


def differing(words: Sequence[Mapping[bytes, bytes]]) -> list[bytes]:
    """Keys of sets of which not all ranks have the same word, given every rank's words by key."""
    seen: dict[bytes, bytes] = {}
    odd = []
    for one in words:
        for key, word in one.items():
            if seen.setdefault(key, word) != word and key not in odd:
                odd.append(key)
    return sorted(odd)


def differences(told: Mapping[int, Sequence[tuple[str, int]]]) -> list[ReplicaDifference]:
    """Which tensors differ and where, given by rank the names and sums of one set's stretches, in the same order."""
    found = []
    ranks = tuple(sorted(told))
    for place in zip(*(told[rank] for rank in ranks), strict=True):
        counts = Counter(value for _, value in place)
        if len(counts) == 1:
            continue
        (most, times), *others = counts.most_common()
        clear = not others or others[0][1] < times
        odd = tuple(rank for rank, (_, value) in zip(ranks, place, strict=True) if value != most) if clear else ranks
        found.append(ReplicaDifference(place[0][0], odd, ranks))
    return found
