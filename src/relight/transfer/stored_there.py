"""How a copy stores its chunks: by themselves; or, of what shares with others where it comes from, with those that are there already.

It follows from how the original is stored and from which checkpoints the copy needs, so a part that is damaged can be made of the
original's again.
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


def packs_there(packs: Iterable[Pack], there: Chunks, *, coded: bool) -> list[Pack]:
    """The same packs, as a copy has them. A chunk of ``there`` lies where that says; of the others those that are ``coded`` by themselves
    lie with the copy as they are, all else plain. A pack of which nothing is coded or there is the file that it is."""
    return [msgspec.structs.replace(pack, stored=_stored(pack, there, coded=coded)) for pack in packs]


def _stored(pack: Pack, there: Chunks, *, coded: bool) -> PackChunks | None:
    homes: dict[tuple[str, str], int] = {}
    pieces, at = list[ChunkLocation](), 0
    for number, (length, value) in enumerate(pack.chunks):
        piece = pack.stored.pieces[number] if pack.stored is not None else None
        where = there.get((value, length))
        if where is not None:
            pieces.append(placed(where, homes))
            continue
        if coded and piece is not None and piece.coded and piece.base is None:
            one = ChunkLocation(OWN, at, piece.length, piece.coded, piece.hash)
        else:
            one = ChunkLocation(OWN, at, length, False, value)
        pieces.append(one)
        at += one.length
    return PackChunks(at, list(homes), pieces) if homes or any(piece.coded for piece in pieces) else None


def there_already(run: Run, history: History) -> Chunks:
    """What the newest checkpoint there has, wherever that lies; nothing if it cannot be read, or needs many others. Cost: reading its root
    and parts."""
    newest = history.live[-1] if history.live else None
    if newest is None or newest.body.home or len(newest.requires) >= DONORS_MAX:
        return {}
    with contextlib.suppress(RelightError):
        found = _chunks_of(run, newest)
        return {key: where for key, where in found.items() if not any("/" in directory for directory, _ in where.homes)}
    return {}


def own_chunks(run: Run, donors: Iterable[Checkpoint]) -> Chunks:
    """What those checkpoints have with them, the first that has it; ``RelightError`` if one cannot be read."""
    found: Chunks = {}
    for one in donors:
        directory = home_of(one.body)
        own = {key: where for key, where in _chunks_of(run, one).items() if where.homes == ((directory, where.homes[0][1]),)}
        found = {**own, **found}
    return found


def _chunks_of(run: Run, one: Checkpoint) -> Chunks:
    found = Chunks()
    for part in run.open(one).parts:
        found |= chunks_of(part.packs, rows_of(home_of(one.body), part.packs))
    return found
