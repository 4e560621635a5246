"""Resumes loaders of each kind after a change within a training epoch, and compares the samples."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from roundtrip import restore, save
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    Sampler,
    WeightedRandomSampler,
    get_worker_info,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.capture import report_steps, unwatch_loaders, watch_loaders
from relight.errors import RelightError
from relight.format import decode_tree
from relight.observe import subscribe
from relight.restore.elastic_state import remap_rank_state

EXACT, ONCE, REFUSED, SILENT = "exact", "continued, each sample once", "refused", "silent"
AGAIN = "from its start, reported"
STEPS = 5


@dataclass(frozen=True)
class Setting:
    """Settings of a loader that a change may alter."""

    size: int = 4
    length: int = 48
    workers: int = 0
    seed: int = 0
    ahead: bool = False
    other_class: bool = False


class Numbers(Dataset):
    """A data set in which each sample is its own number."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


class Stream(IterableDataset):
    """A stream of samples in order. Each of n workers takes every n-th one."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __iter__(self) -> Iterator[int]:
        info = get_worker_info()
        return iter(range(self.length) if info is None else range(info.id, self.length, info.num_workers))


class Clocked(Stream):
    """A stream in an order that no seed reproduces."""

    def __iter__(self) -> Iterator[int]:
        order = list(super().__iter__())
        random.SystemRandom().shuffle(order)
        return iter(order)


class Keeping(Stream):
    """A stream with a state."""

    def __init__(self, length: int) -> None:
        super().__init__(length)
        self.at = 0

    def __iter__(self) -> Iterator[int]:
        for number in list(super().__iter__())[self.at :]:
            self.at += 1
            yield number
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Rotated(Sampler[int]):
    """A sampler of the script's own."""

    def __init__(self, length: int) -> None:
        self.length, self.rng = length, random.Random(3)

    def __len__(self) -> int:
        return self.length

    def __iter__(self) -> Iterator[int]:
        first = self.rng.randrange(self.length)
        return iter([(first + number) % self.length for number in range(self.length)])


class InPairs(Sampler[list[int]]):
    """A batch sampler of the script's own."""

    def __init__(self, length: int, size: int) -> None:
        self.length, self.size = length, size

    def __len__(self) -> int:
        return (self.length + self.size - 1) // self.size

    def __iter__(self) -> Iterator[list[int]]:
        order = list(range(self.length))[::-1]
        return iter([order[first : first + self.size] for first in range(0, self.length, self.size)])


def _loader(setting: Setting, data: Dataset, plain: type[DataLoader] = DataLoader, **options: Any) -> DataLoader:
    other = StatefulDataLoader if plain is DataLoader else DataLoader
    given = {"batch_size": setting.size, "num_workers": setting.workers, **options}
    return (other if setting.other_class else plain)(data, **given)


def _weighted(setting: Setting) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, setting.length + 1), setting.length, replacement=False)


KINDS: dict[str, Callable[[Setting], DataLoader]] = {
    "`DataLoader`, in order": lambda setting: _loader(setting, Numbers(setting.length)),
    "`DataLoader`, `shuffle=True`": lambda setting: _loader(setting, Numbers(setting.length), shuffle=True),
    "`DataLoader`, `generator=`": lambda setting: _loader(
        setting, Numbers(setting.length), shuffle=True, generator=torch.Generator().manual_seed(setting.seed)
    ),
    "`DataLoader`, own sampler": lambda setting: _loader(
        setting, Numbers(setting.length), sampler=Rotated(setting.length)
    ),
    "`DataLoader`, own batch sampler": lambda setting: _loader(
        setting, Numbers(setting.length), batch_size=1, batch_sampler=InPairs(setting.length, setting.size)
    ),
    "`DataLoader`, `BatchSampler` as sampler": lambda setting: _loader(
        setting,
        Numbers(setting.length),
        batch_size=None,
        sampler=BatchSampler(Rotated(setting.length), setting.size, False),
    ),
    "`DataLoader`, `DistributedSampler`": lambda setting: _loader(
        setting,
        Numbers(setting.length),
        sampler=DistributedSampler(Numbers(setting.length), num_replicas=1, rank=0, seed=setting.seed),
    ),
    "`DataLoader`, `WeightedRandomSampler`": lambda setting: _loader(
        setting, Numbers(setting.length), sampler=_weighted(setting)
    ),
    "`DataLoader`, persistent workers": lambda setting: _loader(
        setting, Numbers(setting.length), shuffle=True, persistent_workers=setting.workers > 0
    ),
    "`DataLoader`, stream": lambda setting: _loader(setting, Stream(setting.length)),
    "`DataLoader`, stream in an order that no seed reproduces": lambda setting: _loader(
        setting, Clocked(setting.length)
    ),
    "`StatefulDataLoader`, in order": lambda setting: _loader(setting, Numbers(setting.length), StatefulDataLoader),
    "`StatefulDataLoader`, `shuffle=True`": lambda setting: _loader(
        setting, Numbers(setting.length), StatefulDataLoader, shuffle=True
    ),
    "`StatefulDataLoader`, stream": lambda setting: _loader(setting, Stream(setting.length), StatefulDataLoader),
    "`StatefulDataLoader`, stream in an order that no seed reproduces": lambda setting: _loader(
        setting, Clocked(setting.length), StatefulDataLoader
    ),
    "`StatefulDataLoader`, stream with a state": lambda setting: _loader(
        setting, Keeping(setting.length), StatefulDataLoader
    ),
}
CHANGES: dict[str, Callable[[Setting], Setting]] = {
    "none": lambda setting: setting,
    "batch size": lambda setting: replace(setting, size=6),
    "workers": lambda setting: replace(setting, workers=1 if setting.workers else 2),
    "no workers": lambda setting: replace(setting, workers=0),
    "more samples": lambda setting: replace(setting, length=60),
    "fewer samples": lambda setting: replace(setting, length=44),
    "seed": lambda setting: replace(setting, seed=9),
    "prefetcher": lambda setting: replace(setting, ahead=True),
    "other class": lambda setting: replace(setting, other_class=True),
}
STARTS = {"0 workers": 0, "2 workers": 2}


def ahead(loader: DataLoader) -> Iterator[Any]:
    """Yield batches like a prefetcher, which takes one batch more than the loop has used."""
    batches = iter(loader)
    following = next(batches)
    while following is not None:
        now, following = following, next(batches, None)
        yield now


def seeded(value: int) -> None:
    """Seed the generators of this process."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def end_workers(loader: DataLoader, *iterators: object) -> None:
    """End the workers of these iterators and of the one that the loader keeps, while their queues still work."""
    for iterator in (getattr(loader, "_iterator", None), *iterators):
        if hasattr(iterator, "_shutdown_workers"):
            iterator._shutdown_workers()


class Life:
    """One process's part of a training run."""

    def __init__(self, make: Callable[[Setting], DataLoader], one: Setting, seed: int) -> None:
        seeded(seed)
        self.one, self.loader = one, make(one)
        watch_loaders({"data": self.loader})

    def train(self, steps: int | None = None) -> list[list[int]]:
        """Take batches, to the end of the training epoch unless ``steps`` are given."""
        seen = []
        for batch in ahead(self.loader) if self.one.ahead else self.loader:
            torch.rand(2)  # dropout
            seen.append(torch.as_tensor(batch).reshape(-1).tolist())
            report_steps({"data": self.loader}, 1)
            if len(seen) == steps:
                break
        return seen

    def close(self) -> None:
        """Restore the loader's class, and end its workers: the garbage collector would wait 5 s for each."""
        unwatch_loaders({"data": self.loader})
        end_workers(self.loader)


def outcome(kind: str, change: str, workers: int) -> str:
    """Return the outcome of a resume; ``SILENT`` if samples are lost or repeated without a report."""
    make, events = KINDS[kind], []
    before = Setting(workers=workers)
    after = CHANGES[change](before)
    if after.ahead:
        before = after
    seeded(7)
    life = Life(make, before, 1)
    seen = life.train(STEPS)
    stored = save({"data": life.loader})
    life.close()
    undo = subscribe(lambda event: events.append(event.name))
    try:
        life = Life(make, after, 50)
        restore(stored, {"data": life.loader})
        rest = life.train()
        next_epoch = life.train()
        life.close()
    except RelightError:
        return REFUSED
    finally:
        undo()
    life = Life(make, before, 1)
    straight = life.train()
    life.close()
    samples = [number for batch in seen + rest for number in batch]
    if sorted(number for batch in next_epoch for number in batch) != list(range(after.length)):
        return SILENT
    if seen + rest == straight and before.length == after.length and kind.find("seed of its own") < 0:
        return EXACT
    if sorted(samples) == list(range(after.length)):
        return ONCE
    return (
        f"reported: {', '.join(sorted(set(events)))}" if set(events) - {"loader.reread", "loader.continued"} else SILENT
    )


def outcome_of_ranks(kind: str) -> str:
    """Return the outcome for two ranks that resume a position of one rank."""
    seeded(7)
    life = Life(KINDS[kind], Setting(), 1)
    life.train(STEPS)
    stored = save({"data": life.loader})
    life.close()
    loader = KINDS[kind](Setting())
    watch_loaders({"data": loader})
    if hasattr(loader.sampler, "num_replicas"):
        loader.sampler.num_replicas, loader.sampler.num_samples, loader.sampler.total_size = 2, 24, 48
    root = decode_tree(stored.tree, len(stored.tensors), "test")
    remapped = remap_rank_state(root, {"data": loader}, rank=0, world=2, saved=1, key="step 4", own=[root])
    unwatch_loaders({"data": loader})
    if "data" in remapped.components:
        return ONCE
    return AGAIN if any(note.startswith("data starts its epoch") for note in remapped.notes) else SILENT
