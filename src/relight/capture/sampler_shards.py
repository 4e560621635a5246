"""Samplers that shard one seeded order among ranks, and the rest of that order when other ranks resume in an epoch.

``DistributedSampler`` orders a data set by seed and training epoch. All ranks have the same order, and rank ``r`` of
``n`` takes every ``n``-th sample from the ``r``-th on. While all ranks have delivered the same number, the delivered
samples are a prefix of the order. The *rest* after it can be sharded among any number of ranks in the same way, and so
can the rest of that. If the number of ranks stays the same, every rank gets the samples that it would have had anyway.
The same samples are repeated or dropped at the end.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from operator import index
from typing import Annotated, Any, NamedTuple

import msgspec
from torch.utils.data import BatchSampler, DataLoader, IterableDataset, Sampler
from torch.utils.data.distributed import DistributedSampler

from relight.capture import rng as generators
from relight.decode import from_plain

_OURS = ("torch.utils.data.sampler", "torchdata.stateful_dataloader.sampler")
"""Modules of the batch samplers that only cut an order into batches. torchdata's sampler is torch's, with a count."""
_COUNT = Annotated[int, msgspec.Meta(ge=0)]
_WHOLE = ("num_replicas", "rank", "seed", "epoch", "num_samples")
_SAME = ("order", "length", "shuffle", "seed", "replicas", "begins", "epoch", "at")
"""Fields that must be equal on all ranks of a sampler."""


class SamplerPosition(msgspec.Struct, frozen=True):
    """A checkpoint's record of a sharding sampler: plain values, equal on all ranks except ``rank``."""

    order: str
    """Name of the function that makes the order."""
    length: _COUNT
    shuffle: bool
    seed: int
    epoch: int
    """The current training epoch, or the last one."""
    replicas: Annotated[int, msgspec.Meta(ge=1)]
    rank: _COUNT
    begins: _COUNT
    """Position in the order at which this iteration over the loader began: 0, or the start of a rest."""
    at: _COUNT | None
    """Position in the order up to which all ranks together have delivered; None between training epochs."""


class ShardedSampler(NamedTuple):
    """A sharding sampler, and how the loader batches it."""

    sampler: DistributedSampler[Any]
    home: dict[str, Any]
    """Attributes of the sampler's owner, the batch sampler or the loader itself; the sampler is its entry ``sampler``.
    """
    size: int
    drops: bool
    """Whether a last batch that is not full is dropped."""


class RemainderSampler(Sampler[int]):
    """The rest of one training epoch's order, from ``begins`` on. It replaces the sampler until that epoch is over."""

    def __init__(self, sharded: ShardedSampler, begins: int, epoch: int) -> None:
        self.sampler, self.begins, self.epoch = sharded.sampler, begins, epoch
        self._home = sharded.home
        self._mine: list[int] | None = None
        sharded.home["sampler"] = self

    def __iter__(self) -> Iterator[int]:
        if self._mine is None:
            self._mine = share_of(order_of(self.sampler, self.epoch), self.begins, *_cut(self.sampler))
        return iter(self._mine)

    def __len__(self) -> int:
        replicas, _, drop = _cut(self.sampler)
        return share_size(len(self.sampler.dataset) - self.begins, replicas, drop)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Set the sampler's epoch, for the epochs after this one."""
        self.sampler.set_epoch(epoch)

    def leave(self) -> None:
        """Put the sampler back in its place."""
        if self._home.get("sampler") is self:
            self._home["sampler"] = self.sampler
        self._mine = None


def share_size(left: int, replicas: int, drop: bool) -> int:
    """Return how many of ``left`` samples each rank gets. ``drop``: drop samples instead of repeating some."""
    left = max(0, left)
    return left // replicas if drop else -(-left // replicas)


def share_of(order: Sequence[int], begins: int, replicas: int, rank: int, drop: bool) -> list[int]:
    """Return one rank's shard of ``order`` from ``begins`` on. The order's first samples are repeated to fill shards."""
    total = share_size(len(order) - begins, replicas, drop) * replicas
    shard = list(order[begins + rank : begins + total : replicas])
    missing = range(len(order), begins + total)
    return shard + [order[place % len(order)] for place in missing if (place - begins) % replicas == rank]


def order_of(sampler: DistributedSampler[Any], epoch: int) -> list[int]:
    """Return the whole order of a training epoch: the samples for a single rank. The sampler is not changed."""
    return _shard_from(sampler, epoch, 1, 0, len(sampler.dataset))  # type: ignore[arg-type]


def sharded_sampler_of(loader: DataLoader[Any]) -> ShardedSampler | str:
    """Return the loader's sampler if it shards an order among ranks, else why other ranks cannot continue. Cheap."""
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is a stream, which no sampler shards"
    home, size, drops = loader.__dict__, 1, False
    batches = loader.batch_sampler
    if batches is not None:
        if not isinstance(batches, BatchSampler) or type(batches).__iter__.__module__ not in _OURS:
            return f"its {type(batches).__name__} makes batches in its own way"
        home, size, drops = batches.__dict__, batches.batch_size, batches.drop_last
    sampler = home.get("sampler")
    if isinstance(sampler, RemainderSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return f"its {type(sampler).__name__} does not shard a seeded order among ranks"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False it is unknown which samples were delivered"
    lacks = [name for name in _WHOLE if not hasattr(getattr(sampler, name, None), "__index__")]
    lacks += [name for name in ("dataset", "shuffle", "drop_last") if not hasattr(sampler, name)]
    if lacks:
        return f"its {type(sampler).__name__} has no {lacks[0]} as DistributedSampler has it"
    share = share_size(len(sampler.dataset), sampler.num_replicas, bool(sampler.drop_last))  # type: ignore[arg-type]
    if not len(sampler) == sampler.num_samples == share:
        return f"its {type(sampler).__name__} gives a rank {len(sampler)} samples, where an even share is {share}"
    return ShardedSampler(sampler, home, size, drops)


def position_tree(
    loader: DataLoader[Any], *, begins: int, epoch: int | None, delivered: int | None, samples: int | None = None
) -> dict[str, Any] | str:
    """Return ``SamplerPosition`` as a tree, or why there is none.

    ``delivered``: batches of the pass that began at ``begins``; None between passes. ``samples``: the samples in those
    batches, if batches have several sizes.
    """
    sharded = sharded_sampler_of(loader)
    if isinstance(sharded, str):
        return sharded
    position = _sampler_position(sharded, begins, epoch if epoch is not None else index(sharded.sampler.epoch))
    reached = None
    if delivered is not None:
        share = share_size(position.length - begins, position.replicas, bool(sharded.sampler.drop_last))
        batches = share // sharded.size if sharded.drops else -(-share // sharded.size)
        # After its last batch a pass is over, and samples that it drops stay dropped: the ranks that resume do not deliver them.
        done = samples if samples is not None else delivered * sharded.size
        over = done >= share if samples is not None else delivered >= batches
        reached = position.length if over else begins + done * position.replicas
    return msgspec.to_builtins(msgspec.structs.replace(position, at=reached))  # type: ignore[no-any-return]


def rest_in(loader: DataLoader[Any], node: Any) -> RemainderSampler | None:
    """Put the rest that the checkpoint's loader continues with in the sampler's place, and return it.

    None if there is no rest, or not for this loader.
    """
    position, sharded = _read(node), sharded_sampler_of(loader)
    if isinstance(position, str) or isinstance(sharded, str) or not position.begins:
        return None
    return RemainderSampler(sharded, position.begins, position.epoch)


def fits_alone(node: Any, loader: DataLoader[Any]) -> bool:
    """Return whether a loader can take the state of ``node`` without other ranks' states.

    That is the case if nothing is sharded, or the number of ranks is the same.
    """
    position, sharded = _read(node), sharded_sampler_of(loader)
    if isinstance(position, str):
        return True
    return not position.begins if isinstance(sharded, str) else position.replicas == sharded.sampler.num_replicas


def belongs_to_rank(node: Any, rank: int) -> bool:
    """Return whether ``node`` is that rank's record."""
    position = _read(node)
    return not isinstance(position, str) and position.rank == rank


def common_position(nodes: Sequence[Any], loader: DataLoader[Any]) -> SamplerPosition | str:
    """Return the position that all ranks' records give together, as this rank's, or why there is none.

    ``nodes``: each rank's result of ``position_tree``.
    """
    positions: list[SamplerPosition] = []
    for rank, node in enumerate(nodes):
        position = _read(node)
        if isinstance(position, str):
            return position if len(nodes) == 1 or len(set(map(repr, nodes))) == 1 else f"rank {rank}: {position}"
        positions.append(position)
    for name in _SAME:
        values = [getattr(record, name) for record in positions]
        differing = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if differing is not None:
            field = "samples delivered" if name == "at" else name
            return f"its ranks differ: {field} {values[0]} on rank 0, {values[differing]} on rank {differing}"
    absent = sorted(set(range(positions[0].replicas)) - {record.rank for record in positions})
    if absent:
        return f"of the {positions[0].replicas} ranks that shared its samples, number {absent[0]} has not saved it"
    return _fits(positions[0], loader)


def _fits(stored: SamplerPosition, loader: DataLoader[Any]) -> SamplerPosition | str:
    """Return ``stored`` as this rank's position if the loader has the same order, otherwise why not."""
    sharded = sharded_sampler_of(loader)
    if isinstance(sharded, str):
        return sharded
    live = _sampler_position(sharded, stored.begins, stored.epoch)
    if stored.order != live.order:
        return f"its order was made by {stored.order}, and is by {live.order} now"
    if stored.length != live.length:
        return f"its data set had {stored.length} samples, and has {live.length} now"
    if stored.shuffle != live.shuffle or (stored.shuffle and stored.seed != live.seed):
        before, now = (f"seed {side.seed}" if side.shuffle else "no shuffling" for side in (stored, live))
        return f"its sampler had {before}, and has {now} now"
    if not _shards_round_robin(sharded.sampler, stored.epoch):
        return f"its {type(sharded.sampler).__name__} does not shard round-robin an order that depends only on seed and epoch"
    reached = stored.at if stored.at is None else min(stored.at, stored.length)
    return msgspec.structs.replace(live, begins=reached or 0, at=reached)


def _sampler_position(sharded: ShardedSampler, begins: int, epoch: int) -> SamplerPosition:
    sampler = sharded.sampler
    replicas, rank, _ = _cut(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return SamplerPosition(
        _maker(sampler).__qualname__,
        length,
        bool(sampler.shuffle),
        index(sampler.seed),
        epoch,
        replicas,
        rank,
        begins,
        None,
    )


def _read(node: Any) -> SamplerPosition | str:
    """Return a stored ``SamplerPosition``, or why there is none."""
    if isinstance(node, str):
        return node
    if not isinstance(node, Mapping):
        return "its state does not record how its samples were sharded"
    try:
        return from_plain(node, SamplerPosition)
    except msgspec.ValidationError:
        return "its record of how its samples were sharded is invalid"


def _cut(sampler: DistributedSampler[Any]) -> tuple[int, int, bool]:
    return index(sampler.num_replicas), index(sampler.rank), bool(sampler.drop_last)


def _maker(sampler: DistributedSampler[Any]) -> Any:
    """Return the function that makes the order; for torchdata's sampler torch's own, as torchdata only adds a count."""
    order_function = type(sampler).__iter__
    return DistributedSampler.__iter__ if order_function.__module__ in _OURS else order_function


def _shard_from(sampler: DistributedSampler[Any], epoch: int, replicas: int, rank: int, share: int) -> list[int]:
    """Return the shard that a copy of the sampler with these attributes gives."""
    clone = copy.copy(sampler)
    clone.epoch, clone.num_replicas, clone.rank, clone.num_samples, clone.total_size = (
        epoch,
        replicas,
        rank,
        share,
        share * replicas,
    )
    return list(_maker(sampler)(clone))


def _shards_round_robin(sampler: DistributedSampler[Any], epoch: int) -> bool:
    """Return whether a subclass with its own order shards it like ``DistributedSampler``, and reproducibly."""
    if _maker(sampler) is DistributedSampler.__iter__:
        return True
    if any(generators.is_generator(value) for value in vars(sampler).values()):
        return False
    before = generators.host_states()
    replicas, rank, drop = _cut(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    order = order_of(sampler, epoch)
    shard = _shard_from(sampler, epoch, replicas, rank, share_size(length, replicas, drop))
    generators.restore_host(before)
    sure = length // replicas
    return len(order) == length and shard[:sure] == order[rank::replicas][:sure]
