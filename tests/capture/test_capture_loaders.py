"""Loaders: a resumed run sees the samples, worker noise and dropout masks that the uninterrupted one would have seen."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from loader_changes import end_workers
from roundtrip import Stored, restore, save
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
)
from torchdata.stateful_dataloader import StatefulDataLoader

from relight.capture import capture, observe_batches, unwatch_loaders, watch_loaders
from relight.errors import IncompatibleState
from relight.observe import Event, subscribe

warnings.filterwarnings("ignore")
logging.getLogger("torchdata").setLevel(logging.ERROR)
SAMPLES, BATCH = 12, 2
EPOCH = SAMPLES // BATCH


class Noisy(Dataset):
    """Samples with their number, and with noise from every generator of the process that made them."""

    def __init__(self, noisy: bool = True) -> None:
        self.noisy = noisy

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[int, float, float, float]:
        if not self.noisy:
            return index, 0.0, 0.0, 0.0
        return index, float(torch.rand(())), random.random(), float(np.random.rand())


class Stream(IterableDataset):
    """An iterable dataset in a fixed order."""

    def __iter__(self) -> Iterator[int]:
        info = torch.utils.data.get_worker_info()
        first, by = (info.id, info.num_workers) if info else (0, 1)
        return iter(range(first, SAMPLES, by))


class Shuffling(Sampler[int]):
    """A sampler with its own Python generator."""

    def __init__(self) -> None:
        self.rng = random.Random(3)

    def __len__(self) -> int:
        return SAMPLES

    def __iter__(self) -> Iterator[int]:
        order = list(range(SAMPLES))
        self.rng.shuffle(order)
        return iter(order)


def seed(value: int) -> None:
    """Seed all of the process's host generators."""
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


class Run:
    """A training loop. Each step takes a batch, draws a dropout mask, and draws from every generator."""

    def __init__(self, make: Callable[[], DataLoader]) -> None:
        self.loader = make()
        self.iterator: Iterator | None = None
        watch_loaders({"data": self.loader})

    def step(self) -> tuple:
        if self.iterator is None:
            self.iterator = iter(self.loader)
        try:
            batch = next(self.iterator)
        except StopIteration:
            self.iterator = iter(self.loader)
            batch = next(self.iterator)
        parts = batch if isinstance(batch, (list, tuple)) else [batch]
        seen = [part.tolist() if isinstance(part, torch.Tensor) else part for part in parts]
        return seen, torch.rand(3).tolist(), random.random(), float(np.random.rand())

    def run(self, steps: int) -> list[tuple]:
        return [self.step() for _ in range(steps)]

    def __del__(self) -> None:
        end_workers(self.loader, self.iterator)


def straight(make: Callable[[], DataLoader], steps: int) -> list[tuple]:
    """Return the trace of an uninterrupted run."""
    seed(1)
    return Run(make).run(steps)


def resumed(make: Callable[[], DataLoader], saves: list[int], steps: int) -> list[tuple]:
    """Return the trace of a run that ends after each save, and resumes in a process with another seed."""
    seed(1)
    run, trace, stored, done = Run(make), [], None, 0
    for stop in [*saves, steps]:
        if stored is not None:
            seed(100 + stop)
            run = Run(make)
            restore(stored, {"data": run.loader})
        trace += run.run(stop - done)
        stored, done = save({"data": run.loader}), stop
    return trace


def plain(**options) -> Callable[[], DataLoader]:
    """Return a maker of plain loaders."""
    return lambda: DataLoader(Noisy(), batch_size=BATCH, **{"shuffle": True, **options})


PLAIN = {
    "in process": plain(),
    "in order": plain(shuffle=False),
    "two workers": plain(num_workers=2),
    "persistent workers": plain(num_workers=2, persistent_workers=True),
    "generator": lambda: plain(generator=torch.Generator().manual_seed(5))(),
    "generator, two workers": lambda: plain(generator=torch.Generator().manual_seed(5), num_workers=2)(),
    "replacement": lambda: plain(shuffle=None, sampler=RandomSampler(Noisy(), replacement=True))(),
    "own sampler": lambda: plain(shuffle=None, sampler=Shuffling())(),
    "batch sampler": lambda: DataLoader(
        Noisy(),
        batch_sampler=BatchSampler(RandomSampler(Noisy(), generator=torch.Generator().manual_seed(5)), BATCH, False),
    ),
    "no batches": lambda: DataLoader(Noisy(), batch_size=None, sampler=RandomSampler(range(EPOCH))),
    "stream": lambda: DataLoader(Stream(), batch_size=BATCH),
    "stream, two workers": lambda: DataLoader(Stream(), batch_size=BATCH, num_workers=2),
}
SAVES = {
    "before any batch": [0],
    "after one": [1],
    "in the middle": [3],
    "twice in one epoch": [2, 4],
    "at an edge": [EPOCH],
    "second epoch": [EPOCH + 2],
    "twice in the second": [EPOCH + 1, EPOCH + 4],
    "across epochs": [2, EPOCH + 3, 2 * EPOCH],
}
LIGHT = ["in the middle", "at an edge", "twice in the second"]
CASES = [(kind, when) for kind in PLAIN for when in (LIGHT if "workers" in kind else SAVES)]


@pytest.mark.parametrize(("kind", "when"), CASES, ids=lambda value: value.replace(" ", "-"))
def test_a_plain_loader_resumes_to_the_bit(kind: str, when: str) -> None:
    """Resume with the samples, worker noise, dropout masks and host generators of the uninterrupted run, wherever and
    however often it is saved."""
    steps = 3 * EPOCH - 1
    expected, actual = straight(PLAIN[kind], steps), resumed(PLAIN[kind], SAVES[when], steps)
    first = next((i for i, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1]), None)
    assert first is None, f"step {first}: {actual[first]}, uninterrupted {expected[first]}"


def stateful(**options) -> Callable[[], DataLoader]:
    """Return a maker of loaders that report their position. They cannot save worker noise, so there is none."""
    return lambda: StatefulDataLoader(
        Noisy(not options.get("num_workers")), batch_size=BATCH, **{"shuffle": True, **options}
    )


STATEFUL = {
    "in process": stateful(),
    "two workers": stateful(num_workers=2),
    "persistent workers": stateful(num_workers=2, persistent_workers=True),
    "generator": lambda: stateful(generator=torch.Generator().manual_seed(5))(),
    "torch's sampler": lambda: stateful(shuffle=None, sampler=RandomSampler(Noisy()))(),
    "stream": lambda: StatefulDataLoader(Stream(), batch_size=BATCH),
}
STATEFUL_CASES = [(kind, when) for kind in STATEFUL for when in (LIGHT if "workers" in kind else SAVES)]


@pytest.mark.parametrize(("kind", "when"), STATEFUL_CASES, ids=lambda value: value.replace(" ", "-"))
def test_a_stateful_loader_resumes_to_the_bit(kind: str, when: str) -> None:
    """Draw no number during repositioning that the uninterrupted run did not draw."""

    def make() -> DataLoader:
        seed(7)  # the sampler seeds itself when it is made
        loader = STATEFUL[kind]()
        seed(1)
        return loader

    steps = 3 * EPOCH - 1
    expected, actual = straight(make, steps), resumed(make, SAVES[when], steps)
    first = next((i for i, pair in enumerate(zip(expected, actual, strict=True)) if pair[0] != pair[1]), None)
    assert first is None, f"step {first}: {actual[first]}, uninterrupted {expected[first]}"


@pytest.mark.parametrize("kind", [*PLAIN, *(f"stateful {name}" for name in STATEFUL)])
def test_capturing_draws_no_random_number(kind: str) -> None:
    """Change no generator during a capture, not even before the first batch."""
    make = STATEFUL[kind.removeprefix("stateful ")] if kind.startswith("stateful ") else PLAIN[kind]
    seed(1)
    loader = make()
    watch_loaders({"data": loader})
    for steps in (0, 1):
        iterator = iter(loader) if steps else None
        for _ in range(steps):
            next(iterator)
        before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        capture({"data": loader})
        after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()
        assert torch.equal(before[0], after[0]) and before[1:] == after[1:]


def test_numbers_drawn_between_iter_and_the_first_batch() -> None:
    """Restore the permutation if the loop draws numbers after ``iter`` and before the first ``next``, such as for a
    warm-up."""

    def trace(save_at: int | None) -> list:
        seed(1)
        loader = plain()()
        watch_loaders({"data": loader})
        iterator = iter(loader)
        torch.rand(5)
        seen = []
        for i in range(EPOCH):
            if i == save_at:
                stored = save({"data": loader})
                seed(50)
                loader = plain()()
                restore(stored, {"data": loader})
                iterator = iter(loader)
            seen.append(next(iterator)[0].tolist())
        return seen

    assert trace(3) == trace(None)


def test_a_distributed_samplers_epoch_is_that_of_the_interrupted_one() -> None:
    """Restore the permutation of ``set_epoch``, wherever in the loader the sampler is."""
    for wrap in (False, True):

        def make(wrap: bool = wrap) -> tuple[DataLoader, DistributedSampler]:
            sampler = DistributedSampler(Noisy(), num_replicas=2, rank=1)
            if wrap:
                return DataLoader(Noisy(False), batch_sampler=BatchSampler(sampler, BATCH, False)), sampler
            return DataLoader(Noisy(False), batch_size=BATCH, sampler=sampler), sampler

        seed(1)
        loader, sampler = make()
        watch_loaders({"data": loader})
        sampler.set_epoch(3)
        iterator = iter(loader)
        next(iterator)
        stored = save({"data": loader})
        rest = [batch[0].tolist() for batch in iterator]
        resumed_loader, _ = make()
        restore(stored, {"data": resumed_loader})
        assert [batch[0].tolist() for batch in resumed_loader] == rest


def test_the_rest_of_an_epoch_that_a_for_loop_left() -> None:
    """Resume a loop that was left by ``break`` with the batches that it had not delivered."""
    seed(1)
    loader = plain()()
    watch_loaders({"data": loader})
    seen = []
    for batch in loader:
        seen += batch[0].tolist()
        if len(seen) == 6:
            break
    stored = save({"data": loader})
    resumed_loader = plain()()
    restore(stored, {"data": resumed_loader})
    assert sorted(seen + [i for batch in resumed_loader for i in batch[0].tolist()]) == list(range(SAMPLES))


def test_an_epoch_that_was_left_is_over_once_the_next_one_has_begun() -> None:
    """After ``break`` and a batch of the next epoch, resume that next epoch, and deliver nothing of the left one."""
    seed(1)
    loader = plain()()
    watch_loaders({"data": loader})
    for _ in loader:
        break
    iterator = iter(loader)
    begun = next(iterator)[0].tolist()
    stored = save({"data": loader})
    rest = [batch[0].tolist() for batch in iterator]
    resumed_loader = plain()()
    restore(stored, {"data": resumed_loader})
    assert [batch[0].tolist() for batch in resumed_loader] == rest
    assert sorted(begun + sum(rest, [])) == list(range(SAMPLES))


def test_a_finished_epoch_is_not_begun_again() -> None:
    """After a save at the last batch, the next loop is empty if the end had not been reached, else it is a new
    epoch."""
    seed(1)
    loader = plain()()
    watch_loaders({"data": loader})
    iterator = iter(loader)
    for _ in range(EPOCH):
        next(iterator)
    before_end = save({"data": loader})
    assert next(iterator, None) is None
    after_end = save({"data": loader})
    for stored, rest in ((before_end, 0), (after_end, EPOCH)):
        resumed_loader = plain()()
        restore(stored, {"data": resumed_loader})
        assert len(list(resumed_loader)) == rest
        assert len(list(resumed_loader)) == EPOCH


@pytest.mark.parametrize(
    "options", [{}, {"num_workers": 2, "persistent_workers": True}], ids=["in process", "persistent workers"]
)
@pytest.mark.parametrize("kind", [DataLoader, StatefulDataLoader])
def test_a_loop_that_is_at_the_next_epoch_gets_that(kind, options) -> None:
    """After a save at the last batch, before the end was reached, a resumed loop may set the next epoch's number. It
    then gets that epoch."""

    def make() -> tuple[DataLoader, DistributedSampler]:
        sampler = DistributedSampler(Noisy(), num_replicas=1, rank=0)
        return kind(Noisy(not options), BATCH, sampler=sampler, **options), sampler

    def epoch(loader: DataLoader, sampler: DistributedSampler, number: int) -> list:
        sampler.set_epoch(number)
        return [[part.tolist() for part in batch] for batch in loader]

    seed(1)
    loader, sampler = make()
    watch_loaders({"data": loader})
    batches = iter(loader)
    for _ in range(EPOCH):
        next(batches)
    stored = save({"data": loader})
    assert next(batches, None) is None
    expected = [epoch(loader, sampler, number) for number in (1, 2)]
    for first in (0, 1):
        seed(50)
        loader, sampler = make()
        restore(stored, {"data": loader})
        assert [epoch(loader, sampler, number) for number in range(first, 3)] == [[]] * (1 - first) + expected


@pytest.mark.parametrize("kind", ["in process", "generator", "two workers", "persistent workers"])
def test_a_restore_into_a_loader_that_is_iterating_takes_effect_at_the_next_iter(kind: str) -> None:
    """Repeat the same batches after each restore in one process, in the first training epoch and in a later one."""
    for steps in (2, EPOCH + 2):
        seed(1)
        run = Run(PLAIN[kind])
        run.run(steps)
        stored = save({"data": run.loader})
        rest = run.run(EPOCH)
        for _ in range(2):
            run.run(1)
            restore(stored, {"data": run.loader})
            run.iterator = None
            assert run.run(EPOCH) == rest, steps


@pytest.mark.parametrize("kind", ["in process", "two workers", "persistent workers"])
def test_a_stateful_loader_goes_back_in_the_same_process(kind: str) -> None:
    """Repeat the same batches after a restore in one process, for loaders that report their position."""
    seed(1)
    run = Run(STATEFUL[kind])
    run.run(EPOCH + 2)
    stored = save({"data": run.loader})
    rest = run.run(EPOCH)
    restore(stored, {"data": run.loader})
    run.iterator = None
    assert run.run(EPOCH) == rest


def test_a_save_right_after_a_restore_holds_the_same_place() -> None:
    """Save the same position again directly after a restore. A third process then resumes where the second would
    have."""
    seed(1)
    run = Run(plain())
    run.run(3)
    stored = save({"data": run.loader})
    rest = run.run(EPOCH)
    for _ in range(2):
        seed(60)
        resumed_run = Run(plain())
        restore(stored, {"data": resumed_run.loader})
        stored = save({"data": resumed_run.loader})
    assert resumed_run.run(EPOCH) == rest


def test_generators_of_a_loader_are_where_they_were_at_an_edge() -> None:
    """Continue a loader's own generator between epochs, so that the next epoch does not repeat the first."""
    seed(1)

    def make() -> DataLoader:
        return plain(generator=torch.Generator().manual_seed(5))()

    loader = make()
    watch_loaders({"data": loader})
    first = [batch[0].tolist() for batch in loader]
    stored = save({"data": loader})
    second = [batch[0].tolist() for batch in loader]
    resumed_loader = make()
    restore(stored, {"data": resumed_loader})
    third = [batch[0].tolist() for batch in resumed_loader]
    assert third != first
    assert third == second


@pytest.mark.parametrize(
    "make",
    [plain(), plain(num_workers=2), stateful(), stateful(num_workers=2)],
    ids=["plain", "workers", "stateful", "stateful workers"],
)
def test_an_observer_sees_what_is_delivered_and_no_more(make) -> None:
    """Call the observer for delivered batches only, in order, for every kind of loader. Prefetched and skipped batches
    do not count."""
    seed(1)
    loader, seen = make(), []
    watch_loaders({"data": loader})
    observe_batches({"data": loader, "other": 3}, lambda batch: seen.append(batch[0].tolist()))
    iterator = iter(loader)
    delivered = [next(iterator)[0].tolist() for _ in range(3)]
    assert seen == delivered
    stored = save({"data": loader})
    resumed_loader, again = make(), []
    observe_batches({"data": resumed_loader}, lambda batch: again.append(batch[0].tolist()))
    restore(stored, {"data": resumed_loader})
    rest = [batch[0].tolist() for batch in resumed_loader]
    assert again == rest and len(rest) == EPOCH - 3


@pytest.mark.parametrize("make", [plain(), stateful()], ids=["plain", "stateful"])
def test_watching_leaves_the_loader_what_it_was(make) -> None:
    """Keep class name, isinstance and length. Unwatching restores the class, and may be repeated."""
    loader = make()
    original = type(loader)
    for _ in range(2):
        watch_loaders({"data": loader})
        observe_batches({"data": loader}, lambda batch: None)
    assert isinstance(loader, original) and type(loader).__name__ == original.__name__ and len(loader) == EPOCH
    iterator = iter(loader)
    next(iterator)
    assert iter(iterator) is iterator and len(iterator) == EPOCH
    for _ in range(2):
        unwatch_loaders({"data": loader})
    assert type(loader) is original and not [name for name in vars(loader) if "relight" in name]


def test_reading_again_is_an_event_and_no_warning() -> None:
    """Report batches that are read again by one event for each loader. A warning would end a script under ``-W
    error``."""
    seed(1)
    loader = plain()()
    watch_loaders({"data": loader})
    next(iter(loader))
    stored = save({"data": loader})
    events: list[Event] = []
    undo = subscribe(events.append)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            resumed_loader = plain()()
            watch_loaders({"data": resumed_loader})
            for _ in range(2):
                restore(stored, {"data": resumed_loader})
                next(iter(resumed_loader))
    finally:
        undo()
    assert [(event.name, event.fields["loader"], event.fields["batches"]) for event in events] == [
        ("loader.reread", "data", 1)
    ]


def test_a_loader_of_the_other_kind_is_a_mismatch_before_anything_is_written() -> None:
    """Refuse a counted position for a loader that reports its own, and the reverse."""
    for make_saved, make_live in ((plain(), stateful()), (stateful(), plain())):
        live, loader = torch.zeros(1), make_saved()
        watch_loaders({"data": loader})
        next(iter(loader))
        stored = save({"data": loader, "w": torch.ones(1)})
        with pytest.raises(IncompatibleState):
            restore(stored, {"data": make_live(), "w": live})
        assert live.item() == 0


def test_a_dataset_that_shrank_is_reported_as_an_error() -> None:
    """Raise an error if the data set has fewer batches than were delivered."""
    seed(1)
    loader = plain(shuffle=False)()
    watch_loaders({"data": loader})
    iterator = iter(loader)
    for _ in range(4):
        next(iterator)
    stored = save({"data": loader})
    small = DataLoader(list(range(4)), batch_size=BATCH)
    restore(stored, {"data": small})
    with pytest.raises(IncompatibleState):
        next(iter(small))


def test_an_unwatched_loader_gets_a_note() -> None:
    """Note that resuming is not exact if a loader is captured in the middle of an uncounted epoch."""
    loader = plain()()
    next(iter(loader))
    assert any("data" in note for note in capture({"data": loader}, rng=False).notes)


def test_randomness_inside_workers_that_cannot_be_carried_is_reported() -> None:
    """List the workers of a stateful loader over a map-style dataset as missed."""
    loader = stateful(num_workers=2)()
    assert any("data" in line and "worker" in line for line in capture({"data": loader}).missed)


def test_the_state_of_a_loader_is_plain_values() -> None:
    """Store positions as plain values: no pickles, no live generators."""
    seed(1)
    for make in (plain(num_workers=2), stateful(num_workers=2)):
        loader = make()
        watch_loaders({"data": loader})
        next(iter(loader))
        stored: Stored = save({"data": loader})
        assert stored.kinds["data"] == "loader"


def _shift(worker: int) -> None:
    """A worker_init_fn that changes the worker's seeds."""
    random.seed(random.randrange(1000) + worker)


@pytest.mark.parametrize("init", [None, _shift], ids=["plain", "own init"])
@pytest.mark.parametrize("at", [EPOCH, 2 * EPOCH, 2 * EPOCH + 2])
def test_persistent_workers_resume_after_the_end_of_an_epoch(at: int, init) -> None:
    """After a save at or after an epoch's end, draw no seed that living workers would not have needed."""

    def trace(stop: int | None) -> list:
        seed(1)
        make = plain(num_workers=2, persistent_workers=True, worker_init_fn=init)
        loader, seen, count = make(), [], 0
        watch_loaders({"data": loader})
        while count < 3 * EPOCH:
            for batch in loader:
                seen.append(([part.tolist() for part in batch], torch.rand(2).tolist()))
                count += 1
                if count == stop and stop % EPOCH:
                    break
            if count == stop:
                stored = save({"data": loader})
                end_workers(loader)
                seed(70)
                loader, stop = make(), None
                restore(stored, {"data": loader})
        end_workers(loader)
        return seen

    assert trace(at) == trace(None)


class PositionLoader(DataLoader):
    """A custom loader that reports its position."""

    at = 0

    def __iter__(self):
        for index in range(self.at, SAMPLES):
            self.at = index + 1
            yield torch.tensor([index])
        self.at = 0

    def state_dict(self) -> dict:
        return {"at": self.at}

    def load_state_dict(self, state: dict) -> None:
        self.at = state["at"]


def test_a_loader_with_a_state_of_its_own_is_asked_for_it() -> None:
    """Use ``state_dict`` and ``load_state_dict`` of a subclass, before the first batch too."""
    for steps in (0, 3):
        loader = PositionLoader(Noisy(False))
        loader.at = 2
        iterator = iter(loader)
        for _ in range(steps):
            next(iterator)
        resumed_loader = PositionLoader(Noisy(False))
        restore(save({"data": loader}), {"data": resumed_loader})
        assert next(iter(resumed_loader)).item() == 2 + steps


def test_a_stream_without_a_state_is_not_counted_twice_by_its_workers() -> None:
    """Resume twice within an epoch of an iterable without a state, with workers, at the right position."""

    def make() -> DataLoader:
        return StatefulDataLoader(Stream(), batch_size=1, num_workers=2)

    expected = [batch.tolist() for batch in make()]
    loader, seen = make(), []
    for steps in (2, 3, 3):
        iterator = iter(loader)
        seen += [next(iterator).tolist() for _ in range(steps)]
        stored = save({"data": loader})
        loader = make()
        restore(stored, {"data": loader})
    assert seen + [batch.tolist() for batch in loader] == expected
