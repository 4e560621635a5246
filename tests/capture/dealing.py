"""Ranks of a job in one process: their loaders, saved together and gone on with by another number of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from roundtrip import Stored, feed, save
from torch.utils.data import DataLoader, DistributedSampler

from relight.capture import plan_restore, watch_loaders
from relight.checkpointer.elastic_state import RemappedState, remap_rank_state
from relight.format import decode_tree

Make = Callable[[int, int], DataLoader]
"""A loader, for a rank and a world."""


def sampler_of(loader: DataLoader) -> Any:
    """The sampler that the user knows, whatever stands in its place."""
    found = loader.batch_sampler.sampler if loader.batch_sampler is not None else loader.sampler
    return found if isinstance(found, DistributedSampler) else getattr(found, "sampler", found)


class Job:
    """Ranks that take a batch each at a step."""

    def __init__(self, world: int, make: Make) -> None:
        self.loaders = [make(rank, world) for rank in range(world)]
        self.names = [f"data{rank}" for rank in range(world)]
        self.iterators: list[Any] | None = None
        for name, loader in zip(self.names, self.loaders, strict=True):
            watch_loaders({name: loader})

    def begin(self, epoch: int | None = None) -> None:
        """As a loop does at the beginning of an epoch; ``epoch`` for ``set_epoch``."""
        if epoch is not None:
            for loader in self.loaders:
                sampler_of(loader).set_epoch(epoch)
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[list[int]] | None:
        """Each rank's samples; None if the epoch is over, which all ranks have to see at once."""
        assert self.iterators is not None
        batches = [next(iterator, None) for iterator in self.iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            return None
        return [batch.reshape(-1).tolist() if isinstance(batch, torch.Tensor) else [batch] for batch in batches]

    def steps(self, count: int) -> list[list[list[int]]]:
        """At most so many steps."""
        found = []
        while len(found) < count and (one := self.step()) is not None:
            found.append(one)
        return found

    def rest(self) -> list[list[list[int]]]:
        """All steps to the end of the epoch."""
        return self.steps(10_000)

    def save(self) -> tuple[Stored, int]:
        """What a checkpoint would hold, and of how many ranks."""
        return save(dict(zip(self.names, self.loaders, strict=True))), len(self.loaders)


def resumed(saved: tuple[Stored, int], world: int, make: Make, *, key: str = "k") -> tuple[Job, list[RemappedState]]:
    """The job that goes on, and what was carried over to each of its ranks."""
    stored, before = saved
    tree = decode_tree(stored.tree, len(stored.tensors), "test")
    own = [{"data": tree[f"data{rank}"]} for rank in range(before)]
    job, found = Job(world, make), []
    for rank, loader in enumerate(job.loaders):
        carried = remap_rank_state(own[rank % before], {"data": loader}, rank=rank, world=world, saved=before, key=key, own=own)
        plan = plan_restore(carried.components, stored.tensors, carried.root, where="test")
        feed(stored, plan.sinks)
        plan.finish()
        carried.finish()
        found.append(carried)
    return job, found


def in_turn(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """What was delivered, in the order in which it was dealt out: from each rank its first, from each its second, …"""
    ranks = [[sample for step in steps for sample in step[rank]] for rank in range(len(steps[0]) if steps else 0)]
    assert len({len(one) for one in ranks}) <= 1
    return [one[place] for place in range(len(ranks[0]) if ranks else 0) for one in ranks]
