"""Decide how a copy stores its chunks: with the copy itself, or, if the original shares chunks, with checkpoints at the destination.

The decision depends only on how the original is stored and on the checkpoints that the copy needs. So a damaged part of the copy can be
made again from the original's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import msgspec

from relight.catalog import Run
from relight.commit.chunk_index import DONORS_MAX, Chunks, chunks_of, home_of, placed, rows_of
from relight.errors import RelightError
from relight.format.chunk_locations import OWN, ChunkLocation, PackChunks
from relight.format.manifest import Pack
from relight.log import Checkpoint, History
from relight.log.known_damage import once_damaged


def packs_there(packs: Iterable[Pack], there: Chunks, *, coded: bool) -> list[Pack]:
    """Return the packs as a copy stores them.

    Chunks in ``there`` are stored where it says. If ``coded``, chunks that are coded by themselves stay coded; all others are stored plain.
    A pack without any chunk in ``there`` and without coded chunks is a plain file.
    """
    return [msgspec.structs.replace(pack, stored=_stored(pack, there, coded=coded)) for pack in packs]


def _stored(pack: Pack, there: Chunks, *, coded: bool) -> PackChunks | None:
    homes: dict[tuple[str, str], int] = {}
    pieces, offset = list[ChunkLocation](), 0
    for number, (length, value) in enumerate(pack.chunks):
        piece = pack.stored.pieces[number] if pack.stored is not None else None
        where = there.get((value, length))
        if where is not None:
            pieces.append(placed(where, homes))
            continue
        if coded and piece is not None and piece.coded and piece.base is None:
            location = ChunkLocation(OWN, offset, piece.length, piece.coded, piece.hash)
        else:
            location = ChunkLocation(OWN, offset, length, False, value)
        pieces.append(location)
        offset += location.length
    return PackChunks(offset, list(homes), pieces) if homes or any(piece.coded for piece in pieces) else None


def there_already(run: Run, history: History) -> tuple[str, Chunks]:
    """Return the id of the destination's newest checkpoint, and its chunks, wherever they are stored.

    Empty if it cannot be read, was repacked, needs too many donors, or was ever found damaged, as was a donor. Cost: reads its root and
    parts. A repacked checkpoint's parts still name donors that may be retired, so a copy that took chunks from there could not be
    committed.
    """
    newest = history.live[-1] if history.live else None
    if newest is None or newest.body.home or newest.self_contained or len(newest.requires) >= DONORS_MAX:
        return "", {}
    if not once_damaged(history).isdisjoint([newest.id, *newest.requires]):
        return "", {}
    with contextlib.suppress(RelightError):
        return newest.id, chunks_there(run, newest)
    return "", {}


def chunks_there(run: Run, checkpoint: Checkpoint) -> Chunks:
    """Return the chunks of a checkpoint that its own run has. Raise ``RelightError`` if it is unreadable."""
    chunks = _chunks_of(run, checkpoint)
    return {key: where for key, where in chunks.items() if not any("/" in directory for directory, _ in where.homes)}


def own_chunks(run: Run, donors: Iterable[Checkpoint]) -> Chunks:
    """Return the chunks that the donors store themselves; of equal chunks the first. Raise ``RelightError`` for unreadable donors."""
    chunks: Chunks = {}
    for donor in donors:
        directory = home_of(donor.body)
        own = {
            key: where
            for key, where in _chunks_of(run, donor).items()
            if where.homes == ((directory, where.homes[0][1]),)
        }
        chunks = {**own, **chunks}
    return chunks


def _chunks_of(run: Run, one: Checkpoint) -> Chunks:
    chunks = Chunks()
    for part in run.open(one).parts:
        chunks |= chunks_of(part.packs, rows_of(home_of(one.body), part.packs))
    return chunks
