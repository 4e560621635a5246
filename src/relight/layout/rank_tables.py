"""Ownership of tensors: which pieces each rank holds, and which it writes. Pure: every rank computes the same result.

A rank's *table* lists the tensors that it holds in whole or part: global name, dtype and shape, and how each is distributed. It does not
depend on the rank itself. Ranks that hold the same tensors in the same way have equal tables: all ranks in data parallel or fully sharded
training, and one table for each stage of a pipeline. So a few tables, and each rank's table number, describe everything.

Every rank that lists a *plain* tensor holds all of it. A tensor that is distributed over a mesh is held in pieces.
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
from relight.layout.shares import SharedBox, assign_boxes

REPLICATED = (-1, 1)
"""Placement of a replicated mesh dimension. Others are ``(dimension of the tensor, split)``, see ``Cut``."""


class Mesh(msgspec.Struct, frozen=True, array_like=True):
    """Ranks in a grid, row by row."""

    shape: tuple[int, ...]
    ranks: tuple[int, ...]


class TableEntry(msgspec.Struct, frozen=True, array_like=True):
    """One tensor. ``mesh``: −1 for a plain tensor, else its mesh number. ``placements``: one for each dimension of the mesh.

    ``flat``: for a tensor that was flattened, row by row, into a longer flat buffer, which is then sharded: ``(offset of the tensor in the
    buffer, elements of the buffer per rank)``. It is sharded over the last dimension of its mesh, and replicated over the others.
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
    """Tensors that a rank holds in whole or part."""

    meshes: tuple[Mesh, ...]
    entries: tuple[TableEntry, ...]


class Work(NamedTuple):
    """A box that a rank must write: ``box`` of its entry number ``entry``. ``piece``: number of the piece that contains the box."""

    entry: int
    box: Box
    piece: int


class TensorOwnership:
    """Tables of all ranks. ``table_of[rank]``: number of the rank's table. Raise ``IncompatibleState`` if ranks disagree about a tensor."""

    def __init__(self, tables: Sequence[Table], table_of: Sequence[int]) -> None:
        self.tables, self.table_of = tuple(tables), tuple(table_of)
        ranks: dict[int, list[int]] = {}
        for rank, number in enumerate(table_of):
            ranks.setdefault(number, []).append(rank)
        self._ranks = {number: tuple(members) for number, members in ranks.items()}
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
                f"the ranks disagree about {len(wrong)} tensors"
                if len(wrong) > 1
                else "the ranks disagree about a tensor",
                details=wrong,
                hint="what differs from rank to rank goes into per_rank=…",
            )

    def leads(self, rank: int) -> bool:
        """Return whether ``rank`` is the lowest with its table. That rank writes 0-d tensors and other state that they share."""
        return self._ranks[self.table_of[rank]][0] == rank

    def pieces(self, rank: int) -> list[list[LocalBox]]:
        """Return the pieces of each entry that ``rank`` holds. ``at`` of a flat piece: its first element in the rank's buffer."""
        view = self._view(rank)
        return [view.pieces(entry) for entry in view.table.entries]

    def work(self, rank: int) -> list[Work]:
        """Return the boxes that ``rank`` writes. Cost: some microseconds per entry, independent of the number of ranks."""
        view = self._view(rank)
        boxes: list[SharedBox] = []
        homes: list[tuple[int, int]] = []
        leads = self.leads(rank)
        works: list[Work] = []
        for index in view.order:
            entry = view.table.entries[index]
            if not entry.shape:
                if leads:
                    works.append(Work(index, Box((), ()), 0))
                continue
            ranks = self._holders(entry, rank)
            for number, piece in enumerate(view.pieces(entry)):
                boxes.append(SharedBox(piece.box, entry.weight, ranks))
                homes.append((index, number))
        for share in assign_boxes(boxes, rank):
            index, number = homes[share.number]
            works.append(Work(index, share.box, number))
        return sorted(works)

    def shared(self, rank: int) -> list[tuple[int, LocalBox, tuple[int, ...]]]:
        """Return the pieces that other ranks also hold: entry number, piece, and all of its ranks. The order is the same on these ranks."""
        view = self._view(rank)
        entries = view.table.entries
        shared_pieces = []
        for index in view.order:
            ranks = self._holders(entries[index], rank)
            if len(ranks) > 1:
                shared_pieces += [(index, piece, ranks) for piece in view.pieces(entries[index])]
        return shared_pieces

    def _view(self, rank: int) -> _Held:
        if rank not in self._views:
            self._views[rank] = _Held(self.tables[self.table_of[rank]], rank)
        return self._views[rank]

    def _holders(self, entry: TableEntry, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold the same pieces of ``entry`` as ``rank``, ascending."""
        homes = self._homes[entry.name]
        own = self.table_of[rank]
        if entry.mesh < 0:
            numbers = tuple(number for number, _ in homes)
            if numbers not in self._together:
                self._together[numbers] = tuple(sorted(member for number in numbers for member in self._ranks[number]))
            return self._together[numbers]
        alike = self._alike(entry, own, entry.mesh, rank)
        if len(homes) == 1:
            return alike
        holders = set(alike)
        mesh = self.tables[own].meshes[entry.mesh]
        for number, index in homes:
            other = self.tables[number].entries[index].mesh
            if self.tables[number].meshes[other] != mesh:
                holders.update(
                    self._alike(entry, number, other, self.tables[number].meshes[other].ranks[mesh.ranks.index(rank)])
                )
        return tuple(sorted(holders))

    def _alike(self, entry: TableEntry, number: int, mesh_number: int, rank: int) -> tuple[int, ...]:
        """Return the ranks of a mesh that differ from ``rank`` only along dimensions over which the entry is replicated."""
        key = (number, mesh_number, entry.placements, entry.flat is not None, rank)
        if key not in self._replicas:
            mesh = self.tables[number].meshes[mesh_number]
            free, own = _free(entry, len(mesh.shape)), coordinate(mesh, rank)
            choices = [
                range(extent) if open_ else (position,)
                for extent, open_, position in zip(mesh.shape, free, own, strict=True)
            ]
            self._replicas[key] = tuple(sorted(mesh.ranks[_number(mesh.shape, index)] for index in product(*choices)))
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
        """Return the ranks that hold elements of a flattened tensor, but do not list it."""
        assert entry.flat is not None
        begin, count = entry.flat
        mesh = self.tables[number].meshes[entry.mesh]
        first, last = begin // count, (begin + prod(entry.shape) - 1) // count
        present = {rank for number, _ in homes for rank in self._ranks[number]}
        return sorted(
            rank for rank in mesh.ranks if first <= coordinate(mesh, rank)[-1] <= last and rank not in present
        )

    def _unsound(self, homes: Sequence[tuple[int, int]]) -> str:
        """Return why a mesh is invalid: it has ranks without the tensor, or lacks ranks with it. ``homes``: table and mesh numbers."""
        present = {rank for number, _ in homes for rank in self._ranks[number]}
        for number, mesh_number in homes:
            mesh = self.tables[number].meshes[mesh_number]
            absent = sorted(set(mesh.ranks) - present)
            if absent or prod(mesh.shape) != len(mesh.ranks):
                return f"spread over ranks {list(mesh.ranks)[:16]}, but {absent[:8]} do not have it"
            outside = sorted(set(self._ranks[number]) - set(mesh.ranks))
            if outside:
                return f"rank {outside[0]} has it, and is not among the ranks it is spread over"
        return ""


class _Held:
    """Pieces of one rank. Computed once for tensors of equal shape and distribution."""

    def __init__(self, table: Table, rank: int) -> None:
        self.table, self._rank = table, rank
        self.order = sorted(range(len(table.entries)), key=lambda index: table.entries[index].name)
        """Numbers of the entries in the order of their names, which is the same on all ranks that hold them."""
        self._known: dict[tuple[object, ...], list[LocalBox]] = {}

    def pieces(self, entry: TableEntry) -> list[LocalBox]:
        """Return the pieces of one entry."""
        key = (entry.shape, entry.mesh, entry.placements, entry.flat)
        if key not in self._known:
            self._known[key] = pieces_of(entry, self.table.meshes, self._rank)
        return self._known[key]


def pieces_of(entry: TableEntry, meshes: Sequence[Mesh], rank: int) -> list[LocalBox]:
    """Return the pieces of ``entry`` that ``rank`` holds."""
    if entry.mesh < 0:
        return [LocalBox(whole(entry.shape), (0,) * len(entry.shape))] if prod(entry.shape) else []
    mesh = meshes[entry.mesh]
    own = coordinate(mesh, rank)
    if entry.flat is not None:
        begin, count = entry.flat
        first = max(0, count * own[-1] - begin)
        last = min(prod(entry.shape), count * (own[-1] + 1) - begin)
        pieces, offset = [], 0
        for box in boxes_of_run(entry.shape, first, max(first, last)):
            pieces.append(LocalBox(box, (offset,)))
            offset += box.elements
        return pieces
    cuts = [
        Cut(dim, extent, position, split)
        for (dim, split), extent, position in zip(entry.placements, mesh.shape, own, strict=True)
        if dim >= 0
    ]
    return local_pieces(entry.shape, cuts)


def coordinate(mesh: Mesh, rank: int) -> tuple[int, ...]:
    """Return the position of ``rank`` in the mesh."""
    number = mesh.ranks.index(rank)
    position: list[int] = []
    for extent in reversed(mesh.shape):
        number, index = divmod(number, extent)
        position.append(index)
    return tuple(reversed(position))


def _number(shape: Sequence[int], coordinates: Sequence[int]) -> int:
    number = 0
    for extent, index in zip(shape, coordinates, strict=True):
        number = number * extent + index
    return number


def _free(entry: TableEntry, dims: int) -> list[bool]:
    if entry.flat is not None:
        return [True] * (dims - 1) + [False]
    return [dim < 0 for dim, _ in entry.placements]


def _spread(table: Table, entry: TableEntry) -> tuple[object, ...]:
    """Return a key that is equal for entries of the same tensor and distribution."""
    mesh = table.meshes[entry.mesh].shape if entry.mesh >= 0 else None
    return entry.dtype, entry.shape, entry.role, mesh, entry.placements, entry.flat


def _mismatch_text(table: Table, entry: TableEntry) -> str:
    text = f"{entry.dtype} {list(entry.shape)} ({entry.role})"
    if entry.mesh < 0:
        return text
    how = (
        "flattened"
        if entry.flat is not None
        else ", ".join("same" if dim < 0 else f"dim {dim}" for dim, _ in entry.placements)
    )
    return f"{text} over {list(table.meshes[entry.mesh].shape)} ranks by {how}"
