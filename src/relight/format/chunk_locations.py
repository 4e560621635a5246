"""Locations of a pack's chunks if the pack is not stored as a file: chunks are coded, or stored by an earlier checkpoint.

A location names the file with the bytes directly, never another checkpoint that refers to it. So a reader needs only this part, and one
file for each chunk. A delta also needs its base, which may be a delta too. Each link of this chain is listed here, and the writer limits
its length.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

from relight.errors import UnsafeContent
from relight.format import names
from relight.format.chunk_codecs import RAW, ChunkCodec, codec_of
from relight.format.digest import DIGEST_BYTES

CHAIN_MAX = 64
"""Longest chain of deltas. A reader reads every link, and holds two chunks in memory."""
OWN = 0
"""Value of ``home`` for this checkpoint's own file; 1 is the first of ``homes``."""


class ChunkLocation(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A chunk's stored bytes: in which file, from where, how many, their own hash.

    ``coded``: code of the codec (``format.chunk_codecs``); False for raw bytes, True for planes and deltas. ``base``: location of the base
    of a delta.
    """

    home: int
    offset: int
    length: int
    coded: bool | int
    hash: bytes
    base: ChunkLocation | None = None

    @property
    def codec(self) -> ChunkCodec:
        """The codec of the chunk. Raise ``UnsafeContent`` if it is not installed."""
        return codec_of(self.coded, self.base is not None)

    @property
    def reach(self) -> int:
        """Bytes that a reader must read for it, including its bases."""
        return sum(link.length for link in self.links())

    def links(self) -> Iterator[ChunkLocation]:
        """Yield this location, its base, the base of that, and so on."""
        link: ChunkLocation | None = self
        while link is not None:
            yield link
            link = link.base


class PackChunks(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """``size``: bytes of this checkpoint's own file, 0 without one. ``homes``: directory and file of each donor. ``pieces``: one per chunk.

    A donor in another run of the store, from which this run branched, has that run's name before its directory: ``RUN/DIRECTORY``.
    """

    size: int
    homes: list[tuple[str, str]]
    pieces: list[ChunkLocation]

    @property
    def bytes(self) -> int:
        """Stored bytes of all chunks with their bases, including those in donors."""
        return sum(piece.reach for piece in self.pieces)

    def donors(self) -> list[str]:
        """Return the ids of the donors of this pack."""
        return sorted(
            {parsed[1].id for directory, _ in self.homes if (parsed := names.parse_home(directory)) is not None}
        )

    @property
    def in_other_runs(self) -> bool:
        """Return whether a donor belongs to another run."""
        return any("/" in directory for directory, _ in self.homes)


def check_stored(stored: PackChunks, lengths: Sequence[int], own: str, where: str) -> None:
    """Raise ``UnsafeContent`` for inconsistent locations. ``lengths``: of the pack's chunks. ``own``: the checkpoint's id. Linear time."""
    if len(stored.pieces) != len(lengths):
        raise UnsafeContent(f"{len(stored.pieces)} locations for {len(lengths)} chunks", where=where)
    for directory, file in stored.homes:
        parsed = names.parse_home(directory)
        if parsed is None or parsed[1].id == own or not names.is_pack_file(file):
            raise UnsafeContent(
                f"stored chunks in {f'{directory}/{file}'[:120]!r}, which is not another checkpoint's pack", where=where
            )
    if len(set(stored.homes)) != len(stored.homes):
        raise UnsafeContent("duplicate donor", where=where)
    offset, used = 0, set[int]()
    for number, (piece, length) in enumerate(zip(stored.pieces, lengths, strict=True)):
        for depth, link in enumerate(piece.links()):
            _check_piece(link, length, len(stored.homes), number, where)
            used.add(link.home)
            if depth == CHAIN_MAX:
                raise UnsafeContent(f"chunk {number}: a chain of more than {CHAIN_MAX} deltas", where=where)
            if depth and link.home == OWN:
                raise UnsafeContent(f"chunk {number}: a delta against a chunk of its own checkpoint", where=where)
        if piece.home == OWN:
            if piece.offset != offset:
                raise UnsafeContent(
                    f"chunk {number}: a gap or an overlap at byte {offset} of the stored file", where=where
                )
            offset += piece.length
    if offset != stored.size:
        raise UnsafeContent(f"stored chunks end at {offset}, their file at {stored.size}", where=where)
    if len(used - {OWN}) != len(stored.homes):
        raise UnsafeContent("a donor is not needed by any chunk", where=where)


def _check_piece(link: ChunkLocation, length: int, homes: int, number: int, where: str) -> None:
    try:
        codec = link.codec
        base = link.base.codec if link.base is not None else RAW
    except UnsafeContent as error:
        raise UnsafeContent(f"chunk {number}: {error.what}", where=where) from None
    wrong = (
        (type(link.coded) is int and link.coded <= 1)
        or not 0 <= link.home <= homes
        or not 0 <= link.offset < 2**62
        or len(link.hash) != DIGEST_BYTES
        or not (0 < link.length < length if link.coded else link.length == length)
        or not (base.exact and base.portable)
        or (not codec.portable and link.home != OWN)
    )
    if wrong:
        raise UnsafeContent(f"chunk {number}: malformed location", where=where)
