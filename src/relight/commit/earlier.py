"""What an attempt's last checkpoint holds: chunks that a save need not write again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from relight.format import Part
from relight.format.names import CheckpointDir, stored_file
from relight.format.stored import OWN, Piece


class Where(NamedTuple):
    """A chunk's stored bytes, and the files that ``home`` of it and of what it differs from means, as ``(directory, file)``."""

    piece: Piece
    homes: tuple[tuple[str, str], ...]
    """One for each link of the chain."""


@dataclass(slots=True)
class Earlier:
    """What the attempt's last checkpoint holds, by hash and length of its chunks."""

    id: str = ""
    requires: frozenset[str] = frozenset()
    chunks: dict[tuple[bytes, int], Where] = field(default_factory=dict)

    def forget(self) -> None:
        """Have the next save store everything itself."""
        self.id, self.requires, self.chunks = "", frozenset(), {}

    def learn(self, directory: CheckpointDir, part: Part) -> None:
        """The checkpoint that was committed last."""
        self.id, self.chunks = directory.id, {}
        needed = set[str]()
        for pack in part.packs:
            own, at = (str(directory), pack.file if pack.stored is None else stored_file(pack.file)), 0
            homes = [own, *(pack.stored.homes if pack.stored is not None else ())]
            for number, (length, value) in enumerate(pack.chunks):
                if pack.stored is None:
                    piece = Piece(OWN, at, length, False, value)
                else:
                    piece = pack.stored.pieces[number]
                self.chunks[value, length] = Where(piece, tuple(homes[link.home] for link in piece.links()))
                at += length
            needed.update(pack.stored.donors() if pack.stored is not None else ())
        self.requires = frozenset(needed)


@dataclass(frozen=True, slots=True)
class Smaller:
    """How a save's packs are to be stored: with what ``earlier`` has, and, if ``coded``, coded."""

    earlier: Earlier = field(default_factory=Earlier)
    coded: bool = True
