"""Routes of a gather to one rank: each box comes once, from the lowest rank that holds it. Pure."""

from __future__ import annotations

from typing import NamedTuple

from relight.layout.boxes import Box, whole
from relight.layout.rank_tables import TableEntry, TensorOwnership


class Route(NamedTuple):
    """``box`` of a tensor comes from ``rank``, which has it in piece ``piece`` of its entry ``entry``."""

    rank: int
    entry: int
    piece: int
    box: Box


class Gathering(NamedTuple):
    """One tensor, from the first table that lists it, and the routes of all its boxes."""

    entry: TableEntry
    routes: tuple[Route, ...]


def gatherings(roster: TensorOwnership) -> list[Gathering]:
    """Return all tensors of all ranks: first those of rank 0, in its table's order, then those of each further rank.

    Cost: some microseconds for each entry of each rank.
    """
    tensors: dict[str, tuple[TableEntry, dict[Box, Route]]] = {}
    for rank, number in enumerate(roster.table_of):
        for index, (entry, pieces) in enumerate(zip(roster.tables[number].entries, roster.pieces(rank), strict=True)):
            _, routes = tensors.setdefault(entry.name, (entry, {}))
            if entry.shape:
                for place, piece in enumerate(pieces):
                    if piece.box.elements:
                        routes.setdefault(piece.box, Route(rank, index, place, piece.box))
            elif not routes:
                routes[whole(())] = Route(rank, index, 0, whole(()))
    return [Gathering(entry, tuple(routes.values())) for entry, routes in tensors.values()]
