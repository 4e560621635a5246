"""Resume in the middle of a training epoch with another number of ranks: each sample is delivered once."""

from __future__ import annotations

import logging
import random
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from dealing import Job, in_turn, resumed, sampler_of
from torch.utils.data import BatchSampler, DataLoader, DistributedSampler, RandomSampler
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

from relight.capture import unwatch_loaders
from relight.capture.sampler_shards import share_of

warnings.filterwarnings("ignore")
logging.getLogger("torchdata").setLevel(logging.ERROR)


def order_of(length: int, *, shuffle: bool = True, seed: int = 0, epoch: int = 0) -> list[int]:
    """Return the order that ``DistributedSampler`` documents."""
    return (
        torch.randperm(length, generator=torch.Generator().manual_seed(seed + epoch)).tolist()
        if shuffle
        else list(range(length))
    )


def maker(
    length: int,
    batch: int | None = 2,
    *,
    loader: Any = DataLoader,
    kind: Any = DistributedSampler,
    drops: bool = False,
    wrap: bool = False,
    sampler_options: dict[str, Any] | None = None,
    **options: Any,
) -> Any:
    """Return a maker of loaders over the numbers below ``length``."""

    def make(rank: int, world: int) -> DataLoader:
        data = torch.arange(length)
        sampler = kind(data, num_replicas=world, rank=rank, **(sampler_options or {}))
        if wrap:
            return loader(data, batch_sampler=BatchSampler(sampler, batch, drops), **options)
        return loader(data, batch_size=batch, sampler=sampler, drop_last=drops, **options)

    return make


def test_with_unchanged_ranks_the_rest_equals_their_own_shares() -> None:
    """With an unchanged number of ranks, the shares of the rest equal the tails of the sampler's own shares. This
    includes repeated samples. Checked for every length, position and number of ranks."""
    for length in range(1, 14):
        for replicas in range(1, 7):
            for drop in (False, True):
                for rank in range(replicas):
                    whole = list(DistributedSampler(range(length), replicas, rank, seed=3, drop_last=drop))
                    order = order_of(length, seed=3)
                    for begins in range(0, length + 1, replicas):
                        assert share_of(order, begins, replicas, rank, drop) == whole[begins // replicas :]


CASES = 240


def a_chain(dice: random.Random) -> None:
    """Interrupt one training epoch several times, then run the next epoch to its end."""
    length, drop, drops = dice.randint(1, 60), dice.random() < 0.3, dice.random() < 0.3
    sampler_options = {"shuffle": dice.random() < 0.8, "seed": dice.randint(0, 5), "drop_last": drop}
    epoch, batch, world = dice.randint(0, 4), dice.randint(1, 4), dice.randint(1, 5)
    order = order_of(length, shuffle=sampler_options["shuffle"], seed=sampler_options["seed"], epoch=epoch)

    def make(rank: int, world: int) -> DataLoader:
        return maker(length, batch, drops=drops, sampler_options=sampler_options)(rank, world)  # type: ignore[no-any-return]

    job, ledger, over = Job(world, make), [], False
    job.begin(epoch)
    left = len(job.loaders[0])
    for _ in range(dice.randint(1, 3)):
        done = job.steps(dice.randint(0, left))
        left -= len(done)
        ledger += in_turn(done)
        over = over or left == 0
        saved, before = job.save(), world
        world = dice.choice([before, dice.randint(1, 5)])
        # an unchanged number of ranks also keeps its batch size
        batch = batch if world == before else dice.randint(1, 4)
        job, _ = resumed(saved, world, make)
        if dice.random() < 0.5:
            job, _ = resumed(job.save(), world, make)  # killed again before a batch
        left = left if world == before else len(job.loaders[0])
        job.begin(epoch)
    last = job.rest()
    ledger += in_turn(last)
    assert len(last) == left
    assert ledger == (order * 5)[: len(ledger)], "what all ranks delivered, in turn, is the order from its beginning"
    if over:
        assert not last
    else:
        twice, never = max(0, len(ledger) - length), max(0, length - len(ledger))
        assert twice < world and never < drop * world + drops * world * batch + 1
    job.begin(epoch + 1)
    plain = Job(world, make)
    plain.begin(epoch + 1)
    assert job.rest() == plain.rest(), "later epochs are the sampler's own"
    assert all(
        type(sampler_of(loader)) is DistributedSampler and len(loader) == len(plain.loaders[0])
        for loader in job.loaders
    )


@pytest.mark.parametrize("part", range(3))
def test_any_chain_of_worlds_delivers_the_epoch_once(part: int) -> None:
    """Deliver each sample once, in the epoch's order, across two to four interrupted jobs. A seed chooses the lengths,
    batch sizes, shuffling, what is dropped and the numbers of ranks, which may repeat. It also chooses the
    interruptions: anywhere, also before the first batch and after the last."""
    for case in range(part, CASES, 3):
        try:
            a_chain(random.Random(case))
        except Exception as error:
            error.add_note(f"case {case}")
            raise


PERSISTENT = {"num_workers": 1, "persistent_workers": True}
KINDS = {
    "plain": maker(35),
    "no batches": maker(35, None),
    "batch sampler": maker(35, wrap=True),
    "counting sampler": maker(35, kind=StatefulDistributedSampler),
    "stateful": maker(35, loader=StatefulDataLoader),
    "stateful, no batches": maker(35, None, loader=StatefulDataLoader),
    "stateful, counting sampler": maker(35, loader=StatefulDataLoader, kind=StatefulDistributedSampler),
    "workers": maker(35, num_workers=1),
    "persistent workers": maker(35, **PERSISTENT),
    "stateful, workers": maker(35, loader=StatefulDataLoader, num_workers=1),
    "stateful, persistent workers": maker(35, loader=StatefulDataLoader, **PERSISTENT),
}


@pytest.mark.parametrize("kind", KINDS, ids=lambda value: value.replace(" ", "-"))
def test_every_kind_of_loader_resumes(kind: str) -> None:
    """Resume with three ranks after two, kill those three twice, resume with two, then run a plain epoch."""
    make, order = KINDS[kind], order_of(35, epoch=1)
    job = Job(2, make)
    job.begin(1)
    ledger = in_turn(job.steps(2))
    for world, saves in ((3, 3), (2, 1)):
        for _ in range(saves):
            job, _ = resumed(job.save(), world, make)
            job.begin(1)
            ledger += in_turn(job.steps(1))
    ledger += in_turn(job.rest())
    assert ledger in (order, [*order, order[0]])
    ended = job.save()  # after the epoch's end nothing of the rest is recorded
    plain = Job(2, make)
    for each in (job, plain, resumed(ended, 2, make)[0], resumed(ended, 3, make)[0]):
        each.begin(2)
        delivered = in_turn(each.rest())
        assert delivered[:35] == order_of(35, epoch=2) and len(delivered) == 36


def test_a_rest_saved_and_resumed_by_as_many_is_exact() -> None:
    """Resuming with an unchanged number of ranks gives bit-identical batches, random draws of workers included. The
    reference is a job of three ranks that was not killed."""

    class Noisy(torch.utils.data.Dataset):
        def __len__(self) -> int:
            return 30

        def __getitem__(self, place: int) -> torch.Tensor:
            return torch.tensor([place, torch.randint(1 << 40, ()).item()])

    def make(rank: int, world: int) -> DataLoader:
        data = Noisy()
        return DataLoader(
            data,
            2,
            sampler=DistributedSampler(data, world, rank),
            generator=torch.Generator().manual_seed(rank),
            **PERSISTENT,
        )

    job = Job(2, make)
    job.begin(0)
    job.steps(3)
    saved = job.save()
    straight, _ = resumed(saved, 3, make)
    straight.begin(0)
    expected = straight.rest()
    straight.begin(1)
    expected += straight.rest()
    for kill_step in (1, len(expected) - 3):
        killed, _ = resumed(saved, 3, make)
        delivered = []
        for epoch in (0, 1):
            killed.begin(epoch)
            delivered += killed.steps(kill_step - len(delivered))
            if len(delivered) == kill_step:
                break
        again, _ = resumed(killed.save(), 3, make)
        again.begin(epoch)
        delivered += again.rest()
        if epoch == 0:
            again.begin(1)
            delivered += again.rest()
        assert delivered == expected, kill_step


def test_samples_are_sharded_by_the_sampler_not_the_world() -> None:
    """Shard by the sampler's number of replicas, not by the world size. First two groups of two ranks share data, then
    four ranks have a share each, then two ranks have."""

    def make(rank: int, world: int) -> DataLoader:
        replicas = sharing.pop(0) if rank == 0 else current[0]
        current[0] = replicas
        return maker(24, 2)(rank * replicas // world, replicas)  # type: ignore[no-any-return]

    sharing, current = [2, 4, 2], [0]
    job = Job(4, make)
    job.begin(0)
    first = job.steps(2)
    assert all(step[0] == step[1] and step[2] == step[3] for step in first)
    ledger = in_turn([step[::2] for step in first])
    job, carried = resumed(job.save(), 4, make)
    assert carried[0].notes == ["data continues after 8 of its epoch's 24 samples, now distributed over 4 ranks"]
    job.begin(0)
    ledger += in_turn(job.steps(1))
    job, carried = resumed(job.save(), 2, make)
    assert carried[0].notes[0] == "4 ranks saved it, and 2 ranks continue"
    job.begin(0)
    assert ledger + in_turn(job.rest()) == order_of(24)


def test_resume_between_one_rank_and_several() -> None:
    """Resume across one rank and several if the loader has a ``DistributedSampler``. A shuffling loader has another
    order."""
    make = maker(20)
    job = Job(1, make)
    job.begin(0)
    ledger = in_turn(job.steps(3))
    job, _ = resumed(job.save(), 3, make)
    job.begin(0)
    ledger += in_turn(job.steps(1))
    job, carried = resumed(job.save(), 1, make)
    assert carried[0].notes == [
        "3 ranks saved it, and one rank continues",
        "data continues after 12 of its epoch's 20 samples, now distributed over one rank",
    ]
    job.begin(0)
    assert ledger + in_turn(job.rest()) == order_of(20)
    alone = Job(1, lambda rank, world: DataLoader(torch.arange(20), 2, shuffle=True))
    alone.begin()
    alone.steps(3)
    job, carried = resumed(alone.save(), 2, make)
    assert (
        carried[0].notes[1]
        == "data starts its epoch again: its RandomSampler does not shard a seeded order among ranks"
    )
    job.begin(0)
    assert in_turn(job.rest()) == order_of(20)


class Reversed(DistributedSampler):
    """A sampler with its own order, which depends on seed and epoch and is sharded round-robin."""

    def __iter__(self) -> Iterator[int]:
        mine = [*reversed(range(len(self.dataset))), *reversed(range(len(self.dataset)))]
        return iter(mine[self.rank : self.total_size : self.num_replicas])


class Blocks(DistributedSampler):
    """A sampler that gives each rank one contiguous block."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank * self.num_samples, (self.rank + 1) * self.num_samples))


class Drawing(DistributedSampler):
    """A sampler that draws its order from the process's generator."""

    def __iter__(self) -> Iterator[int]:
        return iter(torch.randperm(len(self.dataset)).tolist()[self.rank : self.total_size : self.num_replicas])


class Holding(Reversed):
    """A sampler that has a generator, which could determine its order."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.dice = random.Random(0)


class Longer(DistributedSampler):
    """A sampler that gives each rank more than an even share."""

    def __len__(self) -> int:
        return self.num_samples + 1


class Bare(DistributedSampler):
    """A sampler that does not call its parent's ``__init__``."""

    def __init__(self, data: Any, num_replicas: int, rank: int) -> None:
        self.dataset, self.num_replicas, self.rank = data, num_replicas, rank

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.rank, 12, self.num_replicas))

    def __len__(self) -> int:
        return 12 // self.num_replicas


class Pairs(BatchSampler):
    """A batch sampler with its own ``__iter__``."""

    def __iter__(self) -> Iterator[list[int]]:
        return super().__iter__()


def test_a_sampler_with_its_own_order_resumes() -> None:
    """Resume a custom order that depends only on seed and epoch, and is sharded round-robin."""
    make = maker(20, kind=Reversed)
    job = Job(2, make)
    job.begin(0)
    ledger = in_turn(job.steps(1))
    job, _ = resumed(job.save(), 3, make)
    job.begin(0)
    ledger += in_turn(job.rest())
    assert ledger[:20] == list(range(20))[::-1]


def custom_batches(rank: int, world: int) -> DataLoader:
    """Return a loader with the caller's own batch sampler."""
    return DataLoader(torch.arange(12), batch_sampler=Pairs(DistributedSampler(range(12), world, rank), 2, False))


class Stream(torch.utils.data.IterableDataset):
    """A data set without positions."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(12))


PLAIN = maker(12)
REASONS = {
    "stream": (lambda rank, world: DataLoader(Stream(), 2), None, "its data set is a stream, which no sampler shards"),
    "batches": (custom_batches, None, "its Pairs makes batches in its own way"),
    "random": (lambda rank, world: DataLoader(torch.arange(12), 2, sampler=RandomSampler(range(12))), None,
               "its RandomSampler does not shard a seeded order among ranks"),
    "blocks": (maker(12, kind=Blocks), None, "its Blocks does not shard round-robin an order that depends only on seed and epoch"),
    "drawing": (maker(12, kind=Drawing), None, "its Drawing does not shard round-robin an order that depends only on seed and epoch"),
    "holding": (maker(12, kind=Holding), None, "its Holding does not shard round-robin an order that depends only on seed and epoch"),
    "longer": (maker(12, kind=Longer), None, "its Longer gives a rank 7 samples, where an even share is 6"),
    "bare": (maker(12, kind=Bare), None, "its Bare has no seed as DistributedSampler has it"),
    "out of order": (maker(12, num_workers=1, in_order=False), None, "with in_order=False it is unknown which samples were delivered"),
    "other sampler": (maker(12), maker(12, kind=Reversed), "its order was made by DistributedSampler.__iter__, and is by Reversed.__iter__ now"),
    "other data": (maker(12), maker(14), "its data set had 12 samples, and has 14 now"),
    "other seed": (maker(12), maker(12, sampler_options={"seed": 4}), "its sampler had seed 0, and has seed 4 now"),
    "no shuffling": (maker(12), maker(12, sampler_options={"shuffle": False}), "its sampler had seed 0, and has no shuffling now"),
    "no sampler now": (maker(12), lambda rank, world: DataLoader(torch.arange(12), 2), "its SequentialSampler does not shard a seeded order among ranks"),
}  # fmt: skip


@pytest.mark.parametrize("why", REASONS, ids=lambda value: value.replace(" ", "-"))
def test_a_loader_that_cannot_resume_restarts_and_reports_why(why: str) -> None:
    """Report the loader's name and the reason, and deliver a whole epoch."""
    before, after, reason = REASONS[why]
    job = Job(2, before)
    job.begin()
    job.steps(1)
    saved = job.save()
    before_it = torch.get_rng_state()
    resumed(saved, 1, after or before)
    assert torch.equal(torch.get_rng_state(), before_it), "finding the reason draws no random number"
    grown, carried = resumed(saved, 3, after or before)
    assert [rank_state.notes[1] for rank_state in carried] == [f"data starts its epoch again: {reason}"] * 3
    epochs = []
    for each in (grown, Job(3, after or before)):
        torch.manual_seed(0)
        each.begin()
        epochs.append(each.rest())
    assert epochs[0] == epochs[1] or why == "out of order"


def test_ranks_that_differ_restart_the_epoch() -> None:
    """Restart the epoch if the ranks have unequal batch counts, seeds or epochs. The same holds for a missing rank,
    uncounted batches, and a loader that was not sharded."""
    job = Job(3, PLAIN)
    job.begin(0)
    job.steps(1)
    next(job.iterators[1])  # type: ignore[index]
    assert restart_reason(job) == "its ranks differ: samples delivered 6 on rank 0, 12 on rank 1"
    job = Job(3, lambda rank, world: maker(12, sampler_options={"seed": rank // 2})(rank, world))
    job.begin(0)
    assert restart_reason(job) == "its ranks differ: seed 0 on rank 0, 1 on rank 2"
    job = Job(3, lambda rank, world: PLAIN(rank // 2, world))
    job.begin(0)
    assert restart_reason(job) == "of the 3 ranks that shared its samples, number 2 has not saved it"
    job = Job(3, PLAIN)
    job.begin(0)
    for loader in job.loaders:
        unwatch_loaders({"data": loader})
    assert restart_reason(job) == "batches it delivered before it was watched were not counted"
    job = Job(3, lambda rank, world: PLAIN(rank, world) if rank < 2 else DataLoader(torch.arange(12), 2))
    job.begin()
    assert restart_reason(job) == "rank 2: its SequentialSampler does not shard a seeded order among ranks"


def restart_reason(job: Job) -> str:
    """Return why a loader restarts its epoch."""
    _, carried = resumed(job.save(), 2, PLAIN)
    return carried[0].notes[1].removeprefix("data starts its epoch again: ")


def test_between_epochs_no_note_mentions_loaders() -> None:
    """Report nothing about loaders before the first epoch and after the end of one."""
    job = Job(2, PLAIN)
    for epoch in (0, 1):
        job, carried = resumed(job.save(), 3 - epoch, PLAIN)
        assert not any("data" in note for note in carried[0].notes)
        job.begin(epoch)
        assert in_turn(job.rest()) == order_of(12, epoch=epoch)


def test_the_rest_is_that_of_the_interrupted_epoch_unless_it_is_empty() -> None:
    """Deliver the rest of the interrupted epoch whatever ``set_epoch`` receives. After a save at the last batch, a loop
    in the next epoch gets that whole epoch. A loop that is still in the old epoch gets an empty rest."""
    job = Job(2, PLAIN)
    job.begin(3)
    ledger = in_turn(job.steps(1))
    saved = job.save()
    ledger += in_turn(job.steps(2))
    ended = job.save()
    shrunk, _ = resumed(saved, 1, PLAIN)
    assert len(shrunk.loaders[0]) == 4
    shrunk.begin(4)
    assert ledger[:4] + in_turn(shrunk.rest()) == order_of(12, epoch=3)
    assert len(shrunk.loaders[0]) == 6
    shrunk.begin(4)
    assert in_turn(shrunk.rest()) == order_of(12, epoch=4)
    for epoch, expected in ((3, []), (4, order_of(12, epoch=4))):
        shrunk, carried = resumed(ended, 3, PLAIN)
        assert carried[0].notes[1] == "data continues after 12 of its epoch's 12 samples, now distributed over 3 ranks"
        shrunk.begin(epoch)
        assert in_turn(shrunk.rest()) == expected


def test_a_rest_that_is_left_is_over() -> None:
    """Deliver a whole epoch to a loop that leaves the rest with ``break`` and starts again."""
    job = Job(2, PLAIN)
    job.begin(3)
    job.steps(1)
    shrunk, _ = resumed(job.save(), 1, PLAIN)
    shrunk.begin(3)
    shrunk.steps(1)
    shrunk.begin(4)
    assert in_turn(shrunk.rest()) == order_of(12, epoch=4)


def test_generators_of_a_loader_come_from_who_had_its_place_or_from_the_id() -> None:
    """Give a new rank seeds of its own, which depend only on the checkpoint's id and the rank's position."""

    def make(rank: int, world: int) -> DataLoader:
        return maker(12, generator=torch.Generator().manual_seed(100 + rank))(rank, world)  # type: ignore[no-any-return]

    job = Job(2, make)
    job.begin(0)
    saved = job.save()
    drawn = [
        [torch.rand((), generator=loader.generator).item() for loader in resumed(saved, 4, make, key=key)[0].loaders]
        for key in ("a", "a", "b")
    ]
    assert drawn[0][:2] == [torch.rand((), generator=loader.generator).item() for loader in job.loaders] == drawn[2][:2]
    assert drawn[0] == drawn[1] and len({*drawn[0], *drawn[2]}) == 6


def test_watching_no_longer_gives_the_sampler_its_place_back() -> None:
    """Put the user's sampler back if watching ends in the middle of a rest."""
    job = Job(2, PLAIN)
    job.begin(0)
    job.steps(1)
    grown, _ = resumed(job.save(), 3, PLAIN)
    assert not isinstance(grown.loaders[0].batch_sampler.sampler, DistributedSampler)
    for loader in grown.loaders:
        unwatch_loaders({"data": loader})
        assert isinstance(loader.batch_sampler.sampler, DistributedSampler)
