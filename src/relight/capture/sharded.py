"""Tensors that are sharded over ranks: DTensors of any mesh and placement (FSDP2, tensor parallelism, both), and
ranges of flattened tensors."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from relight.format import dtype_named
from relight.layout import Box, Item
from relight.layout.rank_tables import REPLICATED, Mesh, Table, TableEntry, pieces_of
from relight.layout.shards import LocalBox
from relight.torch_private.tensors import local_shard, settled_shard, strided_factor, unusual_order


class ShardingOf(NamedTuple):
    """Sharding of a tensor: the ranks, the placements, and this rank's part.

    ``flat``: see ``TableEntry``; ``local`` then has one dimension.
    """

    mesh: Mesh
    placements: tuple[tuple[int, int], ...]
    local: torch.Tensor
    flat: tuple[int, int] | None = None

    def pieces(self, shape: Sequence[int], rank: int) -> list[LocalBox]:
        """Return the boxes of ``local`` in a tensor of that global shape."""
        entry = TableEntry("", "", 1, tuple(shape), "", 0, self.placements, self.flat)
        return pieces_of(entry, (self.mesh,), rank)

    @property
    def how(self) -> tuple[object, ...]:
        """The sharding without the memory."""
        return self.mesh, self.placements, self.flat

    def held(self, piece: LocalBox) -> torch.Tensor:
        """Return a view of one of the pieces, in the shape of its box."""
        if self.flat is None:
            return part(self.local, Box(piece.at, piece.box.size))
        return self.local[piece.at[0] : piece.at[0] + piece.box.elements].view(piece.box.size)


class Flat:
    """A tensor of ``shape``. This rank has a range of its elements, ``spread.local``, which is a part of ``owner``."""

    def __init__(self, shape: Sequence[int], spread: ShardingOf, owner: torch.Tensor) -> None:
        self.shape, self.spread, self.owner = torch.Size(shape), spread, owner
        self.dtype = spread.local.dtype
        self.requires_grad = owner.requires_grad

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for two that stand for the same tensor, as long as their owner lives."""
        return "flat", id(self.owner), self.spread.flat


class LiveSlice(NamedTuple):
    """``local`` holds ``box`` of a tensor of ``shape``. The caller states it: no ranks are involved. For reading only."""

    shape: tuple[int, ...]
    box: Box
    local: torch.Tensor

    @property
    def dtype(self) -> torch.dtype:
        """The live dtype."""
        return self.local.dtype


def part(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """Return a view of ``box`` of a tensor; the tensor itself if that is all of it."""
    if box.size == tuple(tensor.shape):
        return tensor
    return tensor[tuple(slice(start, start + size) for start, size in zip(box.start, box.size, strict=True))]


def own_rank() -> int:
    """Return this process's rank in the default group; 0 without a group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def is_spread(value: object) -> bool:
    """Return whether ``value`` is a DTensor, a ``Flat`` or a ``LiveSlice``. Costs nothing if the process uses none."""
    if type(value) is Flat or type(value) is LiveSlice:
        return True
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(value, torch.Tensor) and isinstance(value, module.DTensor)


def local_of(tensor: torch.Tensor | Flat | LiveSlice) -> torch.Tensor:
    """Return this process's part of a tensor: a DTensor's local tensor; any other tensor itself."""
    if isinstance(tensor, LiveSlice):
        return tensor.local
    if isinstance(tensor, Flat):
        return tensor.spread.local
    return local_shard(tensor) if is_spread(tensor) else tensor


def spread_of(tensor: Any) -> ShardingOf | str:
    """Return how a DTensor or ``Flat`` is sharded, or why it cannot be saved."""
    if type(tensor) is Flat:
        return tensor.spread
    placements: list[tuple[int, int]] = []
    for dim, placement in enumerate(tensor.placements):
        if placement.is_partial():
            return f"a sum that was not reduced over mesh dimension {dim} ({placement}): redistribute() it first"
        if placement.is_replicate():
            placements.append(REPLICATED)
        elif type(placement).__name__ == "Shard":
            placements.append((placement.dim, 1))
        elif (factor := strided_factor(placement)) is not None:
            placements.append((placement.dim, factor))
        else:
            return f"placed as {placement}, which Relight does not know"
    if order := unusual_order(tensor):
        return f"sharded in an unusual order ({order}); redistribute() it to the usual one"
    local, grid = settled_shard(tensor), tensor.device_mesh.mesh
    return ShardingOf(Mesh(tuple(grid.shape), tuple(grid.flatten().tolist())), tuple(placements), local)


def table_of(items: Sequence[Item], spreads: Mapping[int, ShardingOf]) -> Table:
    """Return the table of a rank that captured ``items``: one entry for each, in their order.

    ``spreads``: the sharded items, by index.
    """
    meshes: dict[Mesh, int] = {}
    entries = []
    for index, item in enumerate(items):
        spread = spreads.get(index)
        shape = tuple(item.shape)
        if spread is None:
            entries.append(TableEntry(item.name, item.dtype, _weight(item), shape, item.role))
        else:
            mesh = meshes.setdefault(spread.mesh, len(meshes))
            entries.append(
                TableEntry(item.name, item.dtype, _weight(item), shape, item.role, mesh, spread.placements, spread.flat)
            )
    return Table(tuple(meshes), tuple(entries))


def _weight(item: Item) -> int:
    return dtype_named(item.dtype).itemsize
