"""Streams with a number of the training epoch, and streams that shuffle in a buffer, as Hugging Face's ``datasets`` has them."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
from roundtrip import restore, save
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset, get_worker_info
from torchdata.nodes import Batcher, Loader, SamplerWrapper
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.capture import watch_loaders

SAMPLES, BATCH = 24, 2
EPOCH = SAMPLES // BATCH
pytestmark = pytest.mark.filterwarnings("ignore:This process.*fork:DeprecationWarning")


class Epochs(IterableDataset):
    """A stream with another order in each training epoch. Each worker has its share."""

    def __init__(self) -> None:
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Take the number of the training epoch."""
        self.epoch = epoch

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        random.Random(self.epoch).shuffle(order)
        info = get_worker_info()
        return iter(order[info.id :: info.num_workers] if info else order)


class BufferShuffledExamplesIterable:
    """The samples of a data set, shuffled in a buffer that its state leaves out, as in the class of this name in ``datasets``."""

    def __init__(self) -> None:
        self.ex_iterable = range(SAMPLES)
        self.taken = 0

    def __iter__(self) -> Iterator[int]:
        rng, buffer = random.Random(0), []
        for self.taken in range(self.taken + 1, SAMPLES + 1):
            buffer.append(self.ex_iterable[self.taken - 1])
            if len(buffer) == 8:
                yield buffer.pop(rng.randrange(8))
        rng.shuffle(buffer)
        yield from buffer
        self.taken = 0


class Buffered(IterableDataset):
    """A stream with a state that shuffles in a buffer."""

    def __init__(self) -> None:
        self._ex_iterable = BufferShuffledExamplesIterable()

    def __iter__(self) -> Iterator[int]:
        return iter(self._ex_iterable)

    def state_dict(self) -> dict[str, Any]:
        """Return the place in the source, without the buffer."""
        return {"taken": self._ex_iterable.taken}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a place in the source."""
        self._ex_iterable.taken = state["taken"]


def epochs(workers: int) -> DataLoader:
    """Return a loader of a stream with training epochs, watched."""
    loader = DataLoader(Epochs(), batch_size=BATCH, num_workers=workers)
    watch_loaders({"data": loader})
    return loader


def numbers(batches: Any) -> list[list[int]]:
    """Return the samples of each batch."""
    return [batch.tolist() for batch in batches]


def taken(loader: DataLoader, count: int) -> list[list[int]]:
    """Return the first batches of a pass, and leave it there."""
    batches = iter(loader)
    return numbers(next(batches) for _ in range(count))


@pytest.mark.parametrize("workers", [0, 2])
def test_a_caller_at_the_next_epoch_gets_all_of_it(workers: int) -> None:
    """Saved after the last batch of an epoch, and restored by a script that computes the epoch's number from the step."""
    loader = epochs(workers)
    loader.dataset.set_epoch(3)
    taken(loader, EPOCH)
    stored = save({"data": loader})
    loader = epochs(workers)
    restore(stored, {"data": loader})
    loader.dataset.set_epoch(4)
    again = numbers(loader)
    whole = epochs(workers)
    whole.dataset.set_epoch(4)
    assert again == numbers(whole)
    assert loader.dataset.epoch == 4


@pytest.mark.parametrize("number", [0, 3])
@pytest.mark.parametrize("workers", [0, 2])
def test_an_interrupted_epoch_continues_in_its_own_order(workers: int, number: int) -> None:
    """Whichever number a script sets before its first pass."""
    loader = epochs(workers)
    loader.dataset.set_epoch(3)
    first = taken(loader, 5)
    stored = save({"data": loader})
    loader = epochs(workers)
    restore(stored, {"data": loader})
    loader.dataset.set_epoch(number)
    rest = numbers(loader)
    whole = epochs(workers)
    whole.dataset.set_epoch(3)
    assert first + rest == numbers(whole)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_state_that_leaves_out_a_shuffle_buffer_is_not_used(workers: int) -> None:
    """The delivered batches are read again, so that no sample of the buffer is lost, and the order stays."""

    def make() -> DataLoader:
        loader = StatefulDataLoader(Buffered(), batch_size=BATCH, num_workers=workers)
        watch_loaders({"data": loader})
        return loader

    whole = numbers(make())
    assert sorted(sum(whole, [])) == list(range(SAMPLES))
    loader = make()
    first = taken(loader, 5)
    stored = save({"data": loader})
    loader = make()
    restore(stored, {"data": loader})
    again = taken(loader, 2)
    stored = save({"data": loader})
    loader = make()
    restore(stored, {"data": loader})
    assert first + again + numbers(loader) == whole
    assert numbers(loader) == whole, "the next training epoch has all samples"


def test_a_loader_of_nodes_continues() -> None:
    """torchdata's ``nodes.Loader`` keeps an iterator that ``state_dict()`` has created, and the state of the end of a pass. Both are dropped."""

    def make() -> Loader:
        sampler = DistributedSampler(range(SAMPLES), num_replicas=1, rank=0)
        return Loader(Batcher(SamplerWrapper(sampler), BATCH))

    straight = make()
    whole = [*straight, *straight]
    for passed in (3, EPOCH, EPOCH + 3):
        loader, seen = make(), []
        batches = iter(loader)
        for _ in range(passed):
            try:
                seen.append(next(batches))
            except StopIteration:
                batches = iter(loader)
                seen.append(next(batches))
        stored = save({"data": loader})
        loader = make()
        restore(stored, {"data": loader})
        batches = iter(loader)
        seen += [next(batches) for _ in range(2)]
        stored = save({"data": loader})
        loader = make()
        restore(stored, {"data": loader})
        assert (seen + [*loader] + [*loader])[: 2 * EPOCH] == whole
