"""How a checkpoint's chunks are stored, by what is in them."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from relight.catalog.opened import Opened
from relight.format.chunk_locations import OWN, ChunkLocation
from relight.format.manifest import contents, tensors_in
from relight.policy.compact import lossy_in

LOSSY = "relight.lossy"
"""In a root's ``user``, as ``commit`` writes it: by pattern, as what tensors are stored inexactly."""


@dataclass(slots=True)
class StoredAs:
    """Chunks of one dtype and role, headers apart. ``new_bytes`` is what this checkpoint itself stores of them, ``stored_bytes`` what a
    restore reads, with what differences start from. Then how many are coded, differences, stored with other checkpoints, derived."""

    dtype: str
    role: str
    chunks: int = 0
    bytes: int = 0
    stored_bytes: int = 0
    new_bytes: int = 0
    coded: int = 0
    differences: int = 0
    elsewhere: int = 0
    derived: int = 0

    def to_dict(self) -> dict[str, str | int]:
        """For ``--json``."""
        return asdict(self)


def stored_as(opened: Opened) -> list[StoredAs]:
    """The kinds of chunks, those with most bytes first."""
    found: dict[tuple[str, str], StoredAs] = {}
    for part in opened.parts:
        for index, pack in enumerate(part.packs):
            held = contents((length for length, _ in pack.chunks), part.tensors, index)
            for number, (kind, _, length) in enumerate(held, 1):
                row = found.setdefault(kind, StoredAs(*kind))
                row.chunks, row.bytes = row.chunks + 1, row.bytes + length
                if pack.stored is None:
                    row.stored_bytes, row.new_bytes = row.stored_bytes + length, row.new_bytes + length
                    continue
                piece = pack.stored.pieces[number]
                row.stored_bytes += piece.reach
                row.new_bytes += piece.length if piece.home == OWN else 0
                row.coded += bool(piece.coded)
                row.differences += piece.base is not None
                row.elsewhere += piece.home != OWN
                row.derived += piece.derived
    return sorted(found.values(), key=lambda row: (-row.bytes, row.dtype, row.role))


def stored_of(opened: Opened) -> dict[str, tuple[str, float]]:
    """Of each tensor whose chunks are not stored raw with this checkpoint: how they are stored, and what this checkpoint itself stores of
    the tensor's bytes, as a ratio. A chunk that several tensors share counts for each of them by its part. "lossy" is only what the
    rules of the save name: an exact tensor may share a chunk with a lossy one.
    """
    lossy = opened.root.user.get(LOSSY)
    named = lossy.items() if isinstance(lossy, dict) else ()
    patterns = {pattern: str(one["as"]) for pattern, one in named if isinstance(one, dict) and "as" in one}
    whole: dict[str, int] = {}
    stored: dict[str, float] = {}
    ways: dict[str, set[str]] = {}
    for part in opened.parts:
        for tensor in part.tensors:
            whole[tensor.name] = whole.get(tensor.name, 0) + tensor.length
        for index, pack in enumerate(part.packs):
            lengths = [length for length, _ in pack.chunks]
            for number, (_, held) in enumerate(tensors_in(lengths, part.tensors, index)):
                if pack.stored is None:
                    ratio, way = 1.0, ""
                else:
                    piece = pack.stored.pieces[number]
                    ratio, way = (piece.length if piece.home == OWN else 0) / lengths[number], _way(piece)
                for tensor, begin, end in held:
                    exact = way == "lossy" and patterns and lossy_in(patterns, tensor.name, tensor.dtype) is None
                    share = 1.0 if exact and piece.home == OWN else ratio
                    stored[tensor.name] = stored.get(tensor.name, 0.0) + (end - begin) * share
                    if way and not exact:
                        ways.setdefault(tensor.name, set()).add(way)
    return {name: (", ".join(sorted(said)), stored[name] / whole[name]) for name, said in ways.items() if whole[name]}


def _way(piece: ChunkLocation) -> str:
    """How one chunk is stored, in a word; empty: as it is."""
    if piece.derived or piece.lossy:
        return "derived" if piece.derived else "lossy"
    if piece.coded:
        return "difference" if piece.base is not None else "coded"
    return "with an earlier one" if piece.home != OWN else ""
