"""Storage statistics of a checkpoint's chunks, by dtype and role."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from relight.format.chunk_codecs import BUILT_IN
from relight.format.chunk_locations import OWN, ChunkLocation
from relight.format.manifest import contents, tensors_in
from relight.format.root_keys import LOSSY
from relight.policy.compact import lossy_in
from relight.reader.opened import Opened


@dataclass(slots=True)
class StoredAs:
    """Storage of the chunks of one dtype and role, without pack headers.

    ``new_bytes``: bytes that this checkpoint itself stores. ``stored_bytes``: bytes that a restore reads, including the bases of
    differences. ``coded``, ``differences``, ``elsewhere`` (stored with other checkpoints), ``derived``: numbers of chunks.
    """

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
    plugins: str = ""
    """Codecs of other packages that store some of the chunks."""

    def to_dict(self) -> dict[str, str | int]:
        """Return the fields for ``--json``."""
        return asdict(self)


def stored_as(opened: Opened) -> list[StoredAs]:
    """Return a row for each kind of chunk, largest first."""
    rows: dict[tuple[str, str], StoredAs] = {}
    for part in opened.parts:
        for index, pack in enumerate(part.packs):
            chunks = contents((length for length, _ in pack.chunks), part.tensors, index)
            for number, (kind, _, length) in enumerate(chunks, 1):
                row = rows.setdefault(kind, StoredAs(*kind))
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
                row.derived += not piece.codec.portable
                if piece.codec not in BUILT_IN and piece.codec.name not in row.plugins.split():
                    row.plugins = " ".join(sorted([*row.plugins.split(), piece.codec.name]))
    return sorted(rows.values(), key=lambda row: (-row.bytes, row.dtype, row.role))


def stored_of(opened: Opened) -> dict[str, tuple[str, float]]:
    """Return, for each tensor not stored raw with this checkpoint, how it is stored and which ratio of its bytes this checkpoint stores.

    A chunk that several tensors share counts for each by its share. Only tensors that the save's rules name are called "lossy": an exact
    tensor may share a chunk with a lossy one.
    """
    named = (LOSSY.read(opened.root.user) or {}).items()
    patterns = {pattern: str(rule["as"]) for pattern, rule in named if isinstance(rule, dict) and "as" in rule}
    whole: dict[str, int] = {}
    stored: dict[str, float] = {}
    encodings_of: dict[str, set[str]] = {}
    for part in opened.parts:
        for tensor in part.tensors:
            whole[tensor.name] = whole.get(tensor.name, 0) + tensor.length
        for index, pack in enumerate(part.packs):
            lengths = [length for length, _ in pack.chunks]
            for number, (_, tensors) in enumerate(tensors_in(lengths, part.tensors, index)):
                if pack.stored is None:
                    ratio, encoding = 1.0, ""
                else:
                    piece = pack.stored.pieces[number]
                    ratio, encoding = (piece.length if piece.home == OWN else 0) / lengths[number], _way(piece)
                for tensor, begin, end in tensors:
                    exact = encoding == "lossy" and patterns and lossy_in(patterns, tensor.name, tensor.dtype) is None
                    share = 1.0 if exact and piece.home == OWN else ratio
                    stored[tensor.name] = stored.get(tensor.name, 0.0) + (end - begin) * share
                    if encoding and not exact:
                        encodings_of.setdefault(tensor.name, set()).add(encoding)
    return {
        name: (", ".join(sorted(encodings)), stored[name] / whole[name])
        for name, encodings in encodings_of.items()
        if whole[name]
    }


def _way(piece: ChunkLocation) -> str:
    """Return how a chunk is stored, in a word; empty if it is stored raw with this checkpoint."""
    if piece.coded:
        return piece.codec.label or piece.codec.name
    return "with an earlier one" if piece.home != OWN else ""
