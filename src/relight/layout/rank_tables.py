"""What all ranks hold, and what each of them writes of it: pure, and worked out by every rank alike.

A rank's *table* lists the tensors it has a part in: global name, dtype and shape, and how each is spread. It says nothing about the rank
itself, so ranks that hold the same tensors in the same way have equal tables: all of them in data parallel or fully sharded training, one
kind for each stage of a pipeline. A few tables and, for each rank, which of them is its own, tell all there is to know.

A *plain* tensor is held whole by every rank whose table lists it. One that is spread over a mesh is held in pieces.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import product
from math import prod
from typing import NamedTuple

import msgspec

from relight.errors import IncompatibleState
from relight.layout.boxes import Box, whole
from relight.layout.shards import Cut, LocalBox, boxes_of_run, local_pieces
from relight.layout.shares import SharedBox, share_out

REPLICATED = (-1, 1)
"""A placement along which all ranks hold the same. Others are ``(dimension of the tensor, split)``, see ``Cut``."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """Ranks in a grid, row by row."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class TableEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. ``mesh`` is −1 for a plain one, else the number of its mesh, and ``placements`` has one for each dimension of that.

    ``flat``: not the tensor but its elements, row by row, were cut, as part of a longer line: ``(where it begins in that line, elements of
    the line a rank holds)``. It is cut over the last dimension of its mesh then, and replicated over the others.
    """

    name: str
    dtype: str
    weight: int
    """Bytes of one element."""
    shape: tuple[int, ...]
    role: str
    mesh: int = -1
    placements: tuple[tuple[int, int], ...] = ()
    flat: tuple[int, int] | None = None


class Table(msgspec.Struct, frozen=True, array_like=True):
    """What a rank has a part in."""

    meshes: tuple[Mesh, ...]
    entries: tuple[TableEntry, ...]


class Work(NamedTuple):
    """``box`` of the rank's entry number ``entry`` is to be written by it. ``piece`` is the piece of it that holds the box."""

    entry: int
    box: Box
    piece: int


class TensorOwnership:
    """All ranks' tables: ``table_of[rank]`` is the number of its own. ``IncompatibleState`` names tensors and ranks that do not agree."""

    def __init__(self, tables: Sequence[Table], table_of: Sequence[int]) -> None:
        self.tables, self.table_of = tuple(tables), tuple(table_of)
        ranks: dict[int, list[int]] = {}
        for rank, number in enumerate(table_of):
            ranks.setdefault(number, []).append(rank)
        self._ranks = {number: tuple(held) for number, held in ranks.items()}
        self._homes: dict[str, list[tuple[int, int]]] = {}
        for number, table in enumerate(tables):
            for index, entry in enumerate(table.entries):
                self._homes.setdefault(entry.name, []).append((number, index))
        self._together: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._replicas: dict[tuple[int, int, tuple[tuple[int, int], ...], bool, int], tuple[int, ...]] = {}
        self._sound: dict[tuple[tuple[int, int], ...], str] = {}
        self._views: dict[int, _Held] = {}
        wrong = [text for name, homes in self._homes.items() for text in self._disagreements(name, homes)]
        if wrong:
            raise IncompatibleState(
                f"the ranks disagree about {len(wrong)} tensors" if len(wrong) > 1 else "the ranks disagree about a tensor",
                details=wrong,
                hint="what differs from rank to rank goes into per_rank=…",
            )

    def leads(self, rank: int) -> bool:
        """Whether ``rank`` is the lowest with its table: it writes what is the same for all of them, and 0-d tensors."""
        return self._ranks[self.table_of[rank]][0] == rank

    def pieces(self, rank: int) -> list[list[LocalBox]]:
        """What ``rank`` holds of each of its entries. ``at`` of a flat one is the element of the rank's own run where the box begins."""
        held = self._view(rank)
        return [held.pieces(entry) for entry in held.table.entries]

    def work(self, rank: int) -> list[Work]:
        """What ``rank`` writes. Costs some microseconds for each of its entries, whatever the number of ranks."""
        view = self._view(rank)
        held: list[SharedBox] = []
        homes: list[tuple[int, int]] = []
        leads = self.leads(rank)
        found: list[Work] = []
        for index in view.order:
            entry = view.table.entries[index]
            if not entry.shape:
                if leads:
                    found.append(Work(index, Box((), ()), 0))
                continue
            ranks = self._holders(entry, rank)
            for number, piece in enumerate(view.pieces(entry)):
                held.append(SharedBox(piece.box, entry.weight, ranks))
                homes.append((index, number))
        for share in share_out(held, rank):
            index, number = homes[share.number]
            found.append(Work(index, share.box, number))
        return sorted(found)

    def shared(self, rank: int) -> list[tuple[int, LocalBox, tuple[int, ...]]]:
        """What other ranks hold as well: the number of the entry, the piece, and all who hold it. In an order that all of those know."""
        view = self._view(rank)
        entries = view.table.entries
        found = []
        for index in view.order:
            ranks = self._holders(entries[index], rank)
            if len(ranks) > 1:
                found += [(index, piece, ranks) for piece in view.pieces(entries[index])]
        return found

    def _view(self, rank: int) -> _Held:
        if rank not in self._views:
            self._views[rank] = _Held(self.tables[self.table_of[rank]], rank)
        return self._views[rank]

    def _holders(self, entry: TableEntry, rank: int) -> tuple[int, ...]:
        """The ranks that hold what ``rank`` holds of ``entry``, ascending."""
        homes = self._homes[entry.name]
        own = self.table_of[rank]
        if entry.mesh < 0:
            numbers = tuple(number for number, _ in homes)
            if numbers not in self._together:
                self._together[numbers] = tuple(sorted(one for number in numbers for one in self._ranks[number]))
            return self._together[numbers]
        alike = self._alike(entry, own, entry.mesh, rank)
        if len(homes) == 1:
            return alike
        found = set(alike)
        mesh = self.tables[own].meshes[entry.mesh]
        for number, index in homes:
            other = self.tables[number].entries[index].mesh
            if self.tables[number].meshes[other] != mesh:
                found.update(self._alike(entry, number, other, self.tables[number].meshes[other].ranks[mesh.ranks.index(rank)]))
        return tuple(sorted(found))

    def _alike(self, entry: TableEntry, number: int, mesh_number: int, rank: int) -> tuple[int, ...]:
        """Ranks of a mesh that differ from ``rank`` only along dimensions over which the entry is replicated."""
        key = (number, mesh_number, entry.placements, entry.flat is not None, rank)
        if key not in self._replicas:
            mesh = self.tables[number].meshes[mesh_number]
            free, own = _free(entry, len(mesh.shape)), coordinate(mesh, rank)
            choices = [range(extent) if open_ else (at,) for extent, open_, at in zip(mesh.shape, free, own, strict=True)]
            self._replicas[key] = tuple(sorted(mesh.ranks[_number(mesh.shape, one)] for one in product(*choices)))
        return self._replicas[key]

    def _disagreements(self, name: str, homes: list[tuple[int, int]]) -> Iterable[str]:
        first_table, first_index = homes[0]
        first = self.tables[first_table].entries[first_index]
        for number, index in homes[1:]:
            other = self.tables[number].entries[index]
            if _spread(self.tables[first_table], first) != _spread(self.tables[number], other):
                yield (
                    f"{name}: {_mismatch_text(self.tables[first_table], first)} on rank {self._ranks[first_table][0]}, "
                    f"{_mismatch_text(self.tables[number], other)} on rank {self._ranks[number][0]}"
                )
                return
        if first.flat is not None:
            absent = self._without(first_table, first, homes)
            if absent:
                yield f"{name}: ranks {absent[:8]} hold elements of it, and do not have it"
        elif first.mesh >= 0:
            key = tuple((number, self.tables[number].entries[index].mesh) for number, index in homes)
            if key not in self._sound:
                self._sound[key] = self._unsound(key)
            if self._sound[key]:
                yield f"{name}: {self._sound[key]}"

    def _without(self, number: int, entry: TableEntry, homes: Sequence[tuple[int, int]]) -> list[int]:
        """Ranks that hold elements of a flattened tensor, and do not list it."""
        assert entry.flat is not None
        begin, count = entry.flat
        mesh = self.tables[number].meshes[entry.mesh]
        first, last = begin // count, (begin + prod(entry.shape) - 1) // count
        there = {rank for number, _ in homes for rank in self._ranks[number]}
        return sorted(rank for rank in mesh.ranks if first <= coordinate(mesh, rank)[-1] <= last and rank not in there)

    def _unsound(self, homes: Sequence[tuple[int, int]]) -> str:
        """Why no tensor can be spread so: over ranks that do not have it, or fewer than those that do. ``homes``: tables and meshes."""
        there = {rank for number, _ in homes for rank in self._ranks[number]}
        for number, mesh_number in homes:
            mesh = self.tables[number].meshes[mesh_number]
            absent = sorted(set(mesh.ranks) - there)
            if absent or prod(mesh.shape) != len(mesh.ranks):
                return f"spread over ranks {list(mesh.ranks)[:16]}, of which {absent[:8]} do not have it"
            outside = sorted(set(self._ranks[number]) - set(mesh.ranks))
            if outside:
                return f"rank {outside[0]} has it, and is not among the ranks it is spread over"
        return ""


class _Held:
    """What one rank holds. Tensors of one shape that are spread alike are cut alike: worked out once."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self._rank = table, rank
        self.order = sorted(range(len(table.entries)), key=lambda index: table.entries[index].name)
        """Numbers of the entries, by name: an order that all who hold them know."""
        self._known: dict[tuple[object, ...], list[LocalBox]] = {}

    def pieces(self, entry: TableEntry) -> list[LocalBox]:
        """Of one entry."""
        key = (entry.shape, entry.mesh, entry.placements, entry.flat)
        if key not in self._known:
            self._known[key] = pieces_of(entry, self.table.meshes, self._rank)
        return self._known[key]


def pieces_of(entry: TableEntry, meshes: Sequence[Mesh], rank: int) -> list[LocalBox]:
    """What ``rank`` holds of ``entry``."""
    if entry.mesh < 0:
        return [LocalBox(whole(entry.shape), (0,) * len(entry.shape))] if prod(entry.shape) else []
    mesh = meshes[entry.mesh]
    own = coordinate(mesh, rank)
    if entry.flat is not None:
        begin, count = entry.flat
        first = max(0, count * own[-1] - begin)
        last = min(prod(entry.shape), count * (own[-1] + 1) - begin)
        pieces, at = [], 0
        for box in boxes_of_run(entry.shape, first, max(first, last)):
            pieces.append(LocalBox(box, (at,)))
            at += box.elements
        return pieces
    cuts = [Cut(dim, extent, at, split) for (dim, split), extent, at in zip(entry.placements, mesh.shape, own, strict=True) if dim >= 0]
    return local_pieces(entry.shape, cuts)


def coordinate(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Where ``rank`` is in the grid."""
    number = mesh.ranks.index(rank)
    found: list[int] = []
    for extent in reversed(mesh.shape):
        number, at = divmod(number, extent)
        found.append(at)
    return tuple(reversed(found))


def _number(shape: Sequence[int], at: Sequence[int]) -> int:
    number = 0
    for extent, index in zip(shape, at, strict=True):
        number = number * extent + index
    return number


def _free(entry: TableEntry, dims: int) -> list[bool]:
    if entry.flat is not None:
        return [True] * (dims - 1) + [False]
    return [dim < 0 for dim, _ in entry.placements]


def _spread(table: Table, entry: TableEntry) -> tuple[object, ...]:
    """Equal for entries that are the same tensor, spread in the same way."""
    mesh = table.meshes[entry.mesh].shape if entry.mesh >= 0 else None
    return entry.dtype, entry.shape, entry.role, mesh, entry.placements, entry.flat


def _mismatch_text(table: Table, entry: TableEntry) -> str:
    said = f"{entry.dtype} {list(entry.shape)} ({entry.role})"
    if entry.mesh < 0:
        return said
    how = "flattened" if entry.flat is not None else ", ".join("same" if dim < 0 else f"dim {dim}" for dim, _ in entry.placements)
    return f"{said} over {list(table.meshes[entry.mesh].shape)} ranks by {how}"
