"""Plans how to rebuild a lost part from the agents' inventories; no roster is needed. Pure.

The descriptions of a stripe's parity pieces define the stripe. For each wanted segment and each stripe with it, the
plan names sources. Each source is multiplied by a factor, and the sum is the segment. Sources are other members' own
parts, where agents still have them, and as many rows of parity as members are missing.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import NamedTuple

from relight.errors import ConfigError
from relight.peers.galois import MEMBERS_MAX, ROWS_MAX, weigh
from relight.peers.messages import Inventory, Own, Parity, ReadRequest, Segment


class CodedSource(NamedTuple):
    """``length`` bytes at an address, from the first byte of ``asked`` on.

    ``factor``: the element of GF(256) to multiply them by.
    """

    address: str
    asked: ReadRequest
    length: int
    factor: int

    @property
    def name(self) -> tuple[str, str, int, bytes, int, int, int]:
        """Return the source's identity without a byte range, to mark a source that failed."""
        read = self.asked
        return self.address, read.id, read.rank, read.ring, read.lane, read.stripe, read.row

    def among(self, bad: Collection[object]) -> bool:
        """Return whether the source, or its whole agent, has failed."""
        return self.name in bad or self.address in bad


class KnownPart(NamedTuple):
    """Layout of a part in an agent's memory: start and size of each pack."""

    starts: tuple[int, ...]
    sizes: tuple[int, ...]


class Stripe(NamedTuple):
    """One stripe of one checkpoint, as the agents that hold its parity describe it."""

    members: tuple[Segment, ...]
    of: int
    rows: Mapping[int, tuple[str, Parity]]
    """Row → the address of the agent that holds it, and its description."""


class Shelves:
    """Index of all agents' inventories, by checkpoint and rank."""

    def __init__(self, inventories: Mapping[str, Inventory]) -> None:
        self._own: dict[tuple[str, int], list[tuple[str, Own]]] = {}
        self._stripes: dict[tuple[str, int], list[Stripe]] = {}
        stripes: dict[tuple[object, ...], Stripe] = {}
        for address, inventory in inventories.items():
            for own in inventory.own:
                if len(own.starts) == len(own.sizes):
                    self._own.setdefault((own.id, own.rank), []).append((address, own))
            for piece in inventory.pieces:
                if _makes_sense(piece):
                    key = (piece.id, piece.lane, piece.ring, piece.stripe, piece.members)
                    rows = stripes.setdefault(key, Stripe(piece.members, piece.of, {})).rows
                    assert isinstance(rows, dict)
                    rows.setdefault(piece.row, (address, piece))
        for (id, *_), stripe in stripes.items():
            for member in stripe.members:
                if member.rank >= 0:
                    self._stripes.setdefault((str(id), member.rank), []).append(stripe)

    def known(self, id: str, rank: int) -> list[KnownPart]:
        """Return the distinct layouts of that part: one, unless an inventory is wrong.

        Layouts of agents' own parts come first.
        """
        own = [KnownPart(part.starts, part.sizes) for _, part in self._own.get((id, rank), [])]
        in_stripes = [
            KnownPart(m.starts, m.sizes)
            for stripe in self._stripes.get((id, rank), [])
            for m in stripe.members
            if m.rank == rank
        ]
        return list(dict.fromkeys(own + in_stripes))

    def whole(self, id: str, rank: int, known: KnownPart, bad: Collection[object] = ()) -> CodedSource | None:
        """Return an agent's own copy of that part as a source; None if no agent has it."""
        for address, own in self._own.get((id, rank), []):
            length = max((start + size for start, size in zip(own.starts, own.sizes)), default=0) - min(
                own.starts, default=0
            )
            source = CodedSource(address, ReadRequest(id, rank, 0, 0), length, 1)
            if KnownPart(own.starts, own.sizes) == known and not source.among(bad):
                return source
        return None

    def sums(
        self, id: str, rank: int, known: KnownPart, number: int, bad: Collection[object] = ()
    ) -> Iterator[tuple[list[CodedSource], int]]:
        """Yield ways to rebuild segment ``number`` of that part: the sources with that sum, and how many agents have
        its stripe."""
        for stripe in self._stripes.get((id, rank), []):
            for target, member in enumerate(stripe.members):
                if (member.rank, member.number, member.starts, member.sizes) == (
                    rank,
                    number,
                    known.starts,
                    known.sizes,
                ):
                    sources = self._sum(id, stripe, target, bad)
                    if sources is not None:
                        yield sources, stripe.of

    def segments(self, id: str, rank: int, known: KnownPart) -> list[Segment]:
        """Return the distinct segments of that part that a stripe has, by offset."""
        by_range = {
            (m.offset, m.length, m.number): m
            for stripe in self._stripes.get((id, rank), [])
            for m in stripe.members
            if (m.rank, m.starts, m.sizes) == (rank, known.starts, known.sizes)
        }
        return [by_range[key] for key in sorted(by_range)]

    def _sum(self, id: str, stripe: Stripe, target: int, bad: Collection[object]) -> list[CodedSource] | None:
        present: dict[int, CodedSource] = {}
        missing = [target]
        for number, member in enumerate(stripe.members):
            if number == target or not member.length:
                continue  # an empty segment adds nothing
            own = self.whole(id, member.rank, KnownPart(member.starts, member.sizes), bad)
            if own is None:
                missing.append(number)
            else:
                read = ReadRequest(id, member.rank, member.offset, 0)
                present[number] = CodedSource(own.address, read, member.length, 1)
        rows: list[tuple[int, CodedSource]] = []
        for row, (address, piece) in sorted(stripe.rows.items()):
            read = ReadRequest(id, -1, 0, 0, piece.ring, piece.lane, piece.stripe, row)
            source = CodedSource(address, read, piece.length, 1)
            if not source.among(bad) and len(rows) < len(missing):
                rows.append((row, source))
        if len(rows) < len(missing):
            return None
        missing.sort()
        try:
            of_rows, of_known = weigh(missing, [row for row, _ in rows], list(present), target)
        except ConfigError:
            return None
        sources = [source for _, source in rows] + list(present.values())
        return [source._replace(factor=factor) for source, factor in zip(sources, of_rows + of_known) if factor]


def _makes_sense(piece: Parity) -> bool:
    """Return whether a description is consistent. It was received from another agent."""
    members = piece.members
    return (
        0 <= piece.row < ROWS_MAX
        and 1 <= len(members) <= MEMBERS_MAX
        and all(len(member.starts) == len(member.sizes) and member.length <= piece.length for member in members)
        and len({member.rank for member in members if member.rank >= 0}) == sum(member.rank >= 0 for member in members)
    )
