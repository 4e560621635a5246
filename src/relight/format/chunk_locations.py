"""Where and how a pack's chunks are stored, if it is not a file as it is: coded, or where an earlier checkpoint has them already.

A piece says where its bytes are, never who knows where they are: what an earlier checkpoint only refers to is referred to where it lies.
So a reader needs no other part than this one, and one file for any chunk; but for differences, which need what they differ from, and that
perhaps what it differs from: each is told here, and a chain of them is no longer than whoever wrote it wanted.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from relight.errors import UnsafeContent
from relight.format import names
from relight.format.digest import DIGEST_BYTES

CHAIN_MAX = 64
"""So many differences one behind the other at most: a reader holds two chunks whatever the number, and reads each."""
DERIVED = 2
"""``coded`` of a derived chunk: see ``format.derived``."""
LOSSY = 3
"""``coded`` of a lossy chunk: see ``format.lossy``."""
OWN = 0
"""The home that is this checkpoint's own file; 1 is the first of ``homes``."""


class ChunkLocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk's stored bytes: in which file, from where, how many, their own hash.

    ``coded``: whether they are a coded chunk, or its very bytes; 2: they say which others in its pack it is made of; 3:
    what they decode to is near what was saved, and is the chunk.
    ``base``: where the chunk is stored that a coded one differs from.
    """

    home: int
    offset: int
    length: int
    coded: bool | int
    hash: bytes
    base: ChunkLocation | None = None

    @property
    def derived(self) -> bool:
        """Whether it only says of which others in its pack the chunk is made: of no use in another pack."""
        return self.coded == DERIVED

    @property
    def reach(self) -> int:
        """What is to be read of it, with all that it differs from."""
        return sum(link.length for link in self.links())

    @property
    def lossy(self) -> bool:
        """Whether it is not what was saved, to the bit: of no use to tell differences from what was."""
        return self.coded == LOSSY

    def links(self) -> Iterator[ChunkLocation]:
        """This one, what it differs from, and so on."""
        one: ChunkLocation | None = self
        while one is not None:
            yield one
            one = one.base


class PackChunks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``size`` of this checkpoint's own file, 0 if there is none; ``homes``: the directory and the file of each donor; a piece a chunk.

    A donor of another run of the store, which this one branched off, has that run's name before its directory: ``RUN/DIRECTORY``.
    """

    size: int
    homes: list[tuple[str, str]]
    pieces: list[ChunkLocation]

    @property
    def bytes(self) -> int:
        """What all chunks take, wherever they lie, with what they differ from."""
        return sum(piece.reach for piece in self.pieces)

    def donors(self) -> list[str]:
        """The ids of checkpoints whose bytes this pack needs."""
        return sorted({parsed[1].id for directory, _ in self.homes if (parsed := names.parse_home(directory)) is not None})

    @property
    def in_other_runs(self) -> bool:
        """Whether some of it lies with a checkpoint of another run."""
        return any("/" in directory for directory, _ in self.homes)


def check_stored(stored: PackChunks, lengths: Sequence[int], own: str, where: str) -> None:
    """Refuse what does not add up, given the lengths of the pack's chunks, and the checkpoint's ``own`` id. Linear in its length."""
    if len(stored.pieces) != len(lengths):
        raise UnsafeContent(f"{len(stored.pieces)} stored pieces for {len(lengths)} chunks", where=where)
    for directory, file in stored.homes:
        parsed = names.parse_home(directory)
        if parsed is None or parsed[1].id == own or not names.is_pack_file(file):
            raise UnsafeContent(f"stored chunks in {f'{directory}/{file}'[:120]!r}, which is no other checkpoint's pack", where=where)
    if len(set(stored.homes)) != len(stored.homes):
        raise UnsafeContent("a donor named twice", where=where)
    at, used = 0, set[int]()
    for number, (piece, length) in enumerate(zip(stored.pieces, lengths, strict=True)):
        for depth, one in enumerate(piece.links()):
            _check_piece(one, length, len(stored.homes), number, where)
            used.add(one.home)
            if depth == CHAIN_MAX:
                raise UnsafeContent(f"chunk {number}: a chain of more than {CHAIN_MAX} differences", where=where)
            if depth and one.home == OWN:
                raise UnsafeContent(f"chunk {number} differs from one of its own checkpoint", where=where)
        if piece.home == OWN:
            if piece.offset != at:
                raise UnsafeContent(f"chunk {number}: a gap or an overlap at byte {at} of what is stored", where=where)
            at += piece.length
    if at != stored.size:
        raise UnsafeContent(f"stored chunks end at {at}, their file at {stored.size}", where=where)
    if len(used - {OWN}) != len(stored.homes):
        raise UnsafeContent("a donor of which nothing is needed", where=where)


def _check_piece(one: ChunkLocation, length: int, homes: int, number: int, where: str) -> None:
    wrong = (
        not (type(one.coded) is bool or one.coded in (DERIVED, LOSSY))
        or not 0 <= one.home <= homes
        or not 0 <= one.offset < 2**62
        or len(one.hash) != DIGEST_BYTES
        or not (0 < one.length < length if one.coded else one.length == length)
        or (one.base is not None and (one.coded is not True or one.base.coded in (DERIVED, LOSSY)))
        or (one.derived and (one.home != OWN or one.base is not None))
    )
    if wrong:
        raise UnsafeContent(f"chunk {number}: a stored piece that makes no sense", where=where)
