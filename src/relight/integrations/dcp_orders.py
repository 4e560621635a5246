"""The coordinator's decisions for all ranks of a DCP save: which rank writes what, and the positions in the tree."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from relight.commit import CommitTarget
from relight.errors import ConfigError
from relight.format import Digest
from relight.importers.nesting import Path, crowded
from relight.integrations.dcp_tree import TENSOR, VALUE, FlatName, apart, usual


class WriteOrders(NamedTuple):
    """The coordinator's orders for a rank: the checkpoint, the rank's part, and the entries at unusual positions."""

    store_id: str
    run_id: str
    epoch: int
    id: str
    rank: int
    world: int
    digest: str
    apart: frozenset[str]
    entries: dict[str, FlatName] | None = None
    """All flat names; on the first rank only."""
    mapped: bool = True
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] | None = None
    """All tensors in the first rank's tree; on the first rank only."""


def arrange(plans: Sequence[SavePlan], place: CommitTarget, checkpoint_id: str) -> list[SavePlan]:
    """Return the plans, each with its rank's orders as ``storage_data``."""
    paths: dict[str, Path | None] = {}
    unusual: set[str] = set()
    for plan in plans:
        mapping = mapping_of(plan)
        for item in plan.items:
            path = mapping.get(item.index.fqn)
            if paths.setdefault(item.index.fqn, path) != path:  # ranks disagree on the path of this name
                unusual.add(item.index.fqn)
    unusual |= crowded({name: usual(name, path) for name, path in paths.items()})
    for plan in plans[1:]:  # only the first rank may have lists: the parts' trees are joined dict by dict
        names = {item.index.fqn for item in plan.items if is_single(item)}
        unusual |= {name for name in names if any(isinstance(element, int) for element in usual(name, paths[name]))}
    entries: dict[str, FlatName] = {}
    tensors: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            name = item.index.fqn
            kind = VALUE if item.tensor_data is None else TENSOR
            entries[name] = FlatName(kind, paths[name], apart(name) if name in unusual else None)
            if item.tensor_data is not None and (rank == 0 or not is_single(item)):
                tensors[name] = (item.tensor_data.properties.dtype, tuple(item.tensor_data.size))
    digest = (
        Digest(repr([(name, entries[name], tensors.get(name)) for name in sorted(entries)]).encode()).digest()[:8].hex()
    )
    common = WriteOrders(
        place.store_id, place.run_id, place.epoch, checkpoint_id, 0, len(plans), digest, frozenset(unusual)
    )
    mapped = any(isinstance(plan.planner_data, Mapping) for plan in plans)
    orders = [common._replace(rank=rank) for rank in range(len(plans))]
    orders[0] = orders[0]._replace(entries=entries, tensors=tensors, mapped=mapped)
    return [dataclasses.replace(plan, storage_data=own) for plan, own in zip(plans, orders, strict=True)]


def is_single(item: WriteItem) -> bool:
    """Return whether the item has no pieces: a value, or a scalar tensor."""
    return item.tensor_data is None or not item.tensor_data.size


def mapping_of(plan: SavePlan) -> Mapping[str, Any]:
    """Return paths by flat name, if the planner flattened the state."""
    return plan.planner_data if isinstance(plan.planner_data, Mapping) else {}


def complete(plans: Sequence[SavePlan], before: Sequence[SavePlan]) -> list[SavePlan]:
    """Replace empty plans by the previous ones: planners that cache send an unchanged plan as an empty one."""
    whole_plans = []
    for rank, plan in enumerate(plans):
        if not is_usable(plan):
            if len(before) != len(plans):
                raise ConfigError(
                    "a planner that caches plans needs one StorageWriter for all saves",
                    hint="set .step before each save",
                )
            plan = before[rank]
        whole_plans.append(plan)
    return whole_plans


def is_usable(plan: SavePlan) -> bool:
    """Return whether the plan is complete, not a reference to the previous one. Older torch has only complete plans."""
    return bool(getattr(plan, "usable", True))


def to_the_first(plans: Sequence[SavePlan], own: Mapping[str, WriteItem]) -> list[SavePlan]:
    """Move all single values that the first rank has to it, so that its tree is complete, with its lists."""
    more = [item for plan in plans[1:] for item in plan.items if is_single(item) and item.index.fqn in own]
    moved = {item.index.fqn for item in more}
    if not moved:
        return list(plans)
    other_plans = [
        dataclasses.replace(plan, items=[item for item in plan.items if item.index.fqn not in moved])
        for plan in plans[1:]
    ]
    return [dataclasses.replace(plans[0], items=[*plans[0].items, *more]), *other_plans]
