"""Ranks of a job in one process. Their loaders are saved together and resumed by another number of ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from roundtrip import Stored, feed, save
from torch.utils.data import DataLoader, DistributedSampler

from relight.capture import plan_restore, watch_loaders
from relight.format import decode_tree
from relight.restore.elastic_state import RemappedState, remap_rank_state

Make = Callable[[int, int], DataLoader]
"""Return a loader for a rank and a world size."""


def sampler_of(loader: DataLoader) -> Any:
    """Return the user's sampler, also while Relight has replaced it in the loader."""
    sampler = loader.batch_sampler.sampler if loader.batch_sampler is not None else loader.sampler
    return sampler if isinstance(sampler, DistributedSampler) else getattr(sampler, "sampler", sampler)


class Job:
    """Ranks that each take one batch at a step."""

    def __init__(self, world: int, make: Make) -> None:
        self.loaders = [make(rank, world) for rank in range(world)]
        self.names = [f"data{rank}" for rank in range(world)]
        self.iterators: list[Any] | None = None
        for name, loader in zip(self.names, self.loaders, strict=True):
            watch_loaders({name: loader})

    def begin(self, epoch: int | None = None) -> None:
        """Start a training epoch as a loop does. Call ``set_epoch`` if ``epoch`` is given."""
        if epoch is not None:
            for loader in self.loaders:
                sampler_of(loader).set_epoch(epoch)
        self.iterators = [iter(loader) for loader in self.loaders]

    def step(self) -> list[list[int]] | None:
        """Return each rank's samples, or None if the epoch is over. All ranks must end at the same step."""
        assert self.iterators is not None
        batches = [next(iterator, None) for iterator in self.iterators]
        if batches[0] is None:
            assert batches == [None] * len(batches)
            return None
        return [batch.reshape(-1).tolist() if isinstance(batch, torch.Tensor) else [batch] for batch in batches]

    def steps(self, count: int) -> list[list[list[int]]]:
        """Run at most ``count`` steps, and return their samples."""
        delivered = []
        while len(delivered) < count and (batches := self.step()) is not None:
            delivered.append(batches)
        return delivered

    def rest(self) -> list[list[list[int]]]:
        """Run all steps to the end of the epoch."""
        return self.steps(10_000)

    def save(self) -> tuple[Stored, int]:
        """Return the contents of a checkpoint, and the number of ranks."""
        return save(dict(zip(self.names, self.loaders, strict=True))), len(self.loaders)


def resumed(saved: tuple[Stored, int], world: int, make: Make, *, key: str = "k") -> tuple[Job, list[RemappedState]]:
    """Return the resumed job, and the state that was remapped to each of its ranks."""
    stored, before = saved
    tree = decode_tree(stored.tree, len(stored.tensors), "test")
    own = [{"data": tree[f"data{rank}"]} for rank in range(before)]
    job, states = Job(world, make), []
    for rank, loader in enumerate(job.loaders):
        carried = remap_rank_state(
            own[rank % before], {"data": loader}, rank=rank, world=world, saved=before, key=key, own=own
        )
        plan = plan_restore(carried.components, stored.tensors, carried.root, where="test")
        feed(stored, plan.sinks)
        plan.finish()
        carried.finish()
        states.append(carried)
    return job, states


def in_turn(steps: Sequence[Sequence[Sequence[int]]]) -> list[int]:
    """Return the delivered samples in the order of the sharding: each rank's first one, each rank's second one, …"""
    ranks = [[sample for step in steps for sample in step[rank]] for rank in range(len(steps[0]) if steps else 0)]
    assert len({len(samples) for samples in ranks}) <= 1
    return [samples[place] for place in range(len(ranks[0]) if ranks else 0) for samples in ranks]
