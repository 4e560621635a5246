"""Samplers that deal one seeded order out to ranks, and what is left of it when other ranks go on in the middle of a training epoch.

``DistributedSampler`` puts a data set in an order that follows from seed and training epoch. All its ranks have the same, and rank ``r`` of
``n`` takes every ``n``-th sample from the ``r``-th on. While all have delivered as many, what they have delivered is the order's beginning.
The *rest* behind it can be dealt out to any number of ranks in the same way, and so can the rest of that. Dealt out to as many as before it
gives what they would have had anyway, with the same samples repeated or dropped at the end.
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
"""Where the batch samplers are that do nothing but cut what they get. Torchdata's sampler is torch's, with a count."""
_COUNT = Annotated[int, msgspec.Meta(ge=0)]
_WHOLE = ("num_replicas", "rank", "seed", "epoch", "num_samples")
_SAME = ("order", "length", "shuffle", "seed", "replicas", "begins", "epoch", "at")
"""What all ranks of a sampler should tell alike."""


class SamplerPosition(msgspec.Struct, frozen=True):
    """What a checkpoint knows of a loader whose sampler deals out: plain values, the same on every rank but for ``rank``."""

    order: str
    """Which function makes the order."""
    length: _COUNT
    shuffle: bool
    seed: int
    epoch: int
    """The training epoch that is under way, or the last one."""
    replicas: Annotated[int, msgspec.Meta(ge=1)]
    rank: _COUNT
    begins: _COUNT
    """Where in the order this pass over the loader began: 0, or where a rest did."""
    at: _COUNT | None
    """How much of the order all ranks together have delivered; None between training epochs."""


class ShardedSampler(NamedTuple):
    """A sampler that deals out, and what the loader makes of it."""

    sampler: DistributedSampler[Any]
    home: dict[str, Any]
    """The attributes of whoever asks the sampler: the batch sampler, or the loader itself. It stands there as ``sampler``."""
    size: int
    drops: bool
    """Whether a last batch that is not full is dropped."""


class RemainderSampler(Sampler[int]):
    """What is left of one training epoch's order from ``begins`` on: stands in for the sampler until that epoch is over."""

    def __init__(self, dealer: ShardedSampler, begins: int, epoch: int) -> None:
        self.sampler, self.begins, self.epoch = dealer.sampler, begins, epoch
        self._home = dealer.home
        self._mine: list[int] | None = None
        dealer.home["sampler"] = self

    def __iter__(self) -> Iterator[int]:
        if self._mine is None:
            self._mine = share_of(order_of(self.sampler, self.epoch), self.begins, *_cut(self.sampler))
        return iter(self._mine)

    def __len__(self) -> int:
        replicas, _, drop = _cut(self.sampler)
        return share_size(len(self.sampler.dataset) - self.begins, replicas, drop)  # type: ignore[arg-type]

    def set_epoch(self, epoch: int) -> None:
        """Tell the sampler, for the epochs behind this one."""
        self.sampler.set_epoch(epoch)

    def leave(self) -> None:
        """Put the sampler back where it was."""
        if self._home.get("sampler") is self:
            self._home["sampler"] = self.sampler
        self._mine = None


def share_size(left: int, replicas: int, drop: bool) -> int:
    """How many of ``left`` samples each rank gets; ``drop``: rather too few than some twice."""
    left = max(0, left)
    return left // replicas if drop else -(-left // replicas)


def share_of(order: Sequence[int], begins: int, replicas: int, rank: int, drop: bool) -> list[int]:
    """What one rank gets of ``order`` from ``begins`` on. What is missing for even shares is taken from the order's first samples again."""
    total = share_size(len(order) - begins, replicas, drop) * replicas
    mine = list(order[begins + rank : begins + total : replicas])
    missing = range(len(order), begins + total)
    return mine + [order[place % len(order)] for place in missing if (place - begins) % replicas == rank]


def order_of(sampler: DistributedSampler[Any], epoch: int) -> list[int]:
    """The whole order of a training epoch: what the sampler would deal out if it had one rank. Leaves the sampler alone."""
    return _dealt_by(sampler, epoch, 1, 0, len(sampler.dataset))  # type: ignore[arg-type]


def dealer_of(loader: DataLoader[Any]) -> ShardedSampler | str:
    """The loader's sampler if it deals an order out to ranks, else why it cannot go on with another number of them. Cheap."""
    if isinstance(loader.dataset, IterableDataset):
        return "its data set is a stream, which no sampler deals out"
    home, size, drops = loader.__dict__, 1, False
    batches = loader.batch_sampler
    if batches is not None:
        if not isinstance(batches, BatchSampler) or type(batches).__iter__.__module__ not in _OURS:
            return f"its {type(batches).__name__} makes batches in a way of its own"
        home, size, drops = batches.__dict__, batches.batch_size, batches.drop_last
    sampler = home.get("sampler")
    if isinstance(sampler, RemainderSampler):
        sampler = sampler.sampler
    if not isinstance(sampler, DistributedSampler):
        return f"its {type(sampler).__name__} is not one that deals a seeded order out to ranks"
    if loader.num_workers and not getattr(loader, "in_order", True):
        return "with in_order=False nobody knows which samples were delivered"
    lacks = [name for name in _WHOLE if not hasattr(getattr(sampler, name, None), "__index__")]
    lacks += [name for name in ("dataset", "shuffle", "drop_last") if not hasattr(sampler, name)]
    if lacks:
        return f"its {type(sampler).__name__} has no {lacks[0]} as DistributedSampler has it"
    share = share_size(len(sampler.dataset), sampler.num_replicas, bool(sampler.drop_last))  # type: ignore[arg-type]
    if not len(sampler) == sampler.num_samples == share:
        return f"its {type(sampler).__name__} gives a rank {len(sampler)} samples, where an even share is {share}"
    return ShardedSampler(sampler, home, size, drops)


def dealt(
    loader: DataLoader[Any], *, begins: int, epoch: int | None, delivered: int | None, samples: int | None = None
) -> dict[str, Any] | str:
    """``Dealt`` as a tree, or why there is none. ``delivered``: batches, of the pass that began at ``begins``; None between passes.

    ``samples``: how many samples those batches have, if they have several sizes.
    """
    dealer = dealer_of(loader)
    if isinstance(dealer, str):
        return dealer
    told = _sampler_position(dealer, begins, epoch if epoch is not None else index(dealer.sampler.epoch))
    at = None
    if delivered is not None:
        share = share_size(told.length - begins, told.replicas, bool(dealer.sampler.drop_last))
        batches = share // dealer.size if dealer.drops else -(-share // dealer.size)
        # Behind its last batch a pass is over, whatever it drops: others that go on do not have that.
        done = samples if samples is not None else delivered * dealer.size
        over = done >= share if samples is not None else delivered >= batches
        at = told.length if over else begins + done * told.replicas
    return msgspec.to_builtins(msgspec.structs.replace(told, at=at))  # type: ignore[no-any-return]


def rest_in(loader: DataLoader[Any], node: Any) -> RemainderSampler | None:
    """Where a loader goes on with a rest, as a checkpoint tells it: that rest, in its place. None if it does not, or not this loader."""
    found, dealer = _read(node), dealer_of(loader)
    if isinstance(found, str) or isinstance(dealer, str) or not found.begins:
        return None
    return RemainderSampler(dealer, found.begins, found.epoch)


def as_it_was(node: Any, loader: DataLoader[Any]) -> bool:
    """Whether a loader can take the state that ``node`` is of without a look at other ranks': nothing is dealt out, or to as many."""
    found, dealer = _read(node), dealer_of(loader)
    if isinstance(found, str):
        return True
    return not found.begins if isinstance(dealer, str) else found.replicas == dealer.sampler.num_replicas


def belongs_to_rank(node: Any, rank: int) -> bool:
    """Whether ``node`` is of that rank of a sampler."""
    found = _read(node)
    return not isinstance(found, str) and found.rank == rank


def common_position(nodes: Sequence[Any], loader: DataLoader[Any]) -> SamplerPosition | str:
    """What all ranks that saved tell together, for this loader to go on from, as this rank's; or why it cannot.

    ``nodes``: what ``dealt`` gave on each of them.
    """
    told: list[SamplerPosition] = []
    for rank, node in enumerate(nodes):
        found = _read(node)
        if isinstance(found, str):
            return found if len(nodes) == 1 or len(set(map(repr, nodes))) == 1 else f"rank {rank}: {found}"
        told.append(found)
    for name in _SAME:
        values = [getattr(one, name) for one in told]
        other = next((rank for rank, value in enumerate(values) if value != values[0]), None)
        if other is not None:
            what = "samples delivered" if name == "at" else name
            return f"ranks were not alike in it: {what} {values[0]} on rank 0, {values[other]} on rank {other}"
    absent = sorted(set(range(told[0].replicas)) - {one.rank for one in told})
    if absent:
        return f"of the {told[0].replicas} its samples were dealt out to, number {absent[0]} has not saved it"
    return _fits(told[0], loader)


def _fits(told: SamplerPosition, loader: DataLoader[Any]) -> SamplerPosition | str:
    """``told`` as of this loader's rank, if it has the same order."""
    dealer = dealer_of(loader)
    if isinstance(dealer, str):
        return dealer
    live = _sampler_position(dealer, told.begins, told.epoch)
    if told.order != live.order:
        return f"its order was made by {told.order}, and is by {live.order} now"
    if told.length != live.length:
        return f"its data set had {told.length} samples, and has {live.length} now"
    if told.shuffle != live.shuffle or (told.shuffle and told.seed != live.seed):
        was, now = (f"seed {one.seed}" if one.shuffle else "no shuffling" for one in (told, live))
        return f"its sampler had {was}, and has {now} now"
    if not _deals_evenly(dealer.sampler, told.epoch):
        return f"its {type(dealer.sampler).__name__} does not deal out in turn an order that follows from seed and epoch alone"
    at = told.at if told.at is None else min(told.at, told.length)
    return msgspec.structs.replace(live, begins=at or 0, at=at)


def _sampler_position(dealer: ShardedSampler, begins: int, epoch: int) -> SamplerPosition:
    sampler = dealer.sampler
    replicas, rank, _ = _cut(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    return SamplerPosition(
        _maker(sampler).__qualname__, length, bool(sampler.shuffle), index(sampler.seed), epoch, replicas, rank, begins, None
    )


def _read(node: Any) -> SamplerPosition | str:
    """A stored ``Dealt``, or why there is none."""
    if isinstance(node, str):
        return node
    if not isinstance(node, Mapping):
        return "it was saved without a word on how its samples are dealt out"
    try:
        return from_plain(node, SamplerPosition)
    except msgspec.ValidationError:
        return "what was saved of how its samples are dealt out is not to be understood"


def _cut(sampler: DistributedSampler[Any]) -> tuple[int, int, bool]:
    return index(sampler.num_replicas), index(sampler.rank), bool(sampler.drop_last)


def _maker(sampler: DistributedSampler[Any]) -> Any:
    """The function that makes the order; not torchdata's, which is torch's with a count of what it gave."""
    made = type(sampler).__iter__
    return DistributedSampler.__iter__ if made.__module__ in _OURS else made


def _dealt_by(sampler: DistributedSampler[Any], epoch: int, replicas: int, rank: int, share: int) -> list[int]:
    """What a copy of the sampler gives that has these attributes."""
    other = copy.copy(sampler)
    other.epoch, other.num_replicas, other.rank, other.num_samples, other.total_size = epoch, replicas, rank, share, share * replicas
    return list(_maker(sampler)(other))


def _deals_evenly(sampler: DistributedSampler[Any], epoch: int) -> bool:
    """Whether a subclass with an order of its own deals it out as ``DistributedSampler`` does, and finds it again."""
    if _maker(sampler) is DistributedSampler.__iter__:
        return True
    if any(generators.is_generator(value) for value in vars(sampler).values()):
        return False
    before = generators.host_states()
    replicas, rank, drop = _cut(sampler)
    length = len(sampler.dataset)  # type: ignore[arg-type]
    order = order_of(sampler, epoch)
    mine = _dealt_by(sampler, epoch, replicas, rank, share_size(length, replicas, drop))
    generators.restore_host(before)
    sure = length // replicas
    return len(order) == length and mine[:sure] == order[rank::replicas][:sure]
