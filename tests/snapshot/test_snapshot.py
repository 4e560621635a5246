"""A snapshot's bytes equal those at the call, or the snapshot names the changed tensors."""

from __future__ import annotations

import ctypes
import random
import threading

import pytest
import torch

from relight.snapshot import Copier, GuardedTensors, SmallCopies, Snapshot

LENGTHS = (5_000, 262_144, 700_001, 1_500_000)


def buffer_of(tensor: torch.Tensor) -> ctypes.Array:
    return (ctypes.c_ubyte * (tensor.numel() * tensor.element_size()))()


def start(tensors: list[torch.Tensor]) -> tuple[Snapshot, list[ctypes.Array], list[list[str]]]:
    buffers = [buffer_of(tensor) for tensor in tensors]
    completions: list[list[str]] = []
    watched = GuardedTensors(
        [(f"t{i}", t.detach(), ctypes.addressof(b)) for i, (t, b) in enumerate(zip(tensors, buffers))]
    )
    return Snapshot(watched.begin(), 0, completions.append), buffers, completions


def same(buffer: ctypes.Array, tensor: torch.Tensor) -> bool:
    return bytes(buffer) == tensor.numpy().tobytes()


def test_what_is_left_alone_is_copied_to_the_byte() -> None:
    """Copy every slice of unchanged tensors, whichever thread copies it. Completion is reported once."""
    tensors = [torch.randn(length) for length in LENGTHS]
    snapshot, buffers, completions = start(tensors)
    copier = Copier(2)
    copier.start(snapshot)
    snapshot.wait()
    assert completions == [[]]
    assert all(same(b, t) for b, t in zip(buffers, tensors))
    copier.close()


def test_nothing_to_copy_is_complete_at_once() -> None:
    """Complete an empty snapshot without a thread."""
    snapshot, _, completions = start([])
    Copier(1).start(snapshot)
    assert snapshot.complete.is_set() and completions == [[]]


def mutate_in_place(tensor: torch.Tensor) -> None:
    tensor.detach().add_(1)


def mutate_data(tensor: torch.Tensor) -> None:
    tensor.data.mul_(2).add_(1)


def mutate_foreach(tensor: torch.Tensor) -> None:
    torch._foreach_add_([tensor.detach()], 1.0)


def swap_data(tensor: torch.Tensor) -> None:
    tensor.data = torch.zeros_like(tensor)


def resize(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(tensor.untyped_storage().nbytes() * 2)


MUTATIONS = [mutate_in_place, mutate_data, mutate_foreach, swap_data, resize]


@pytest.mark.parametrize("mutate", MUTATIONS)
@pytest.mark.parametrize("copied", ["nothing", "half", "all but one slice"])
def test_a_change_is_reported_or_does_no_harm(mutate, copied: str) -> None:
    """Change a tensor before, during and just before the end of copying. Its bytes are those at the call, or it is
    named."""
    tensors = [torch.nn.Parameter(torch.randn(1_500_000)), torch.nn.Parameter(torch.randn(700_001))]
    before = [t.detach().clone() for t in tensors]
    snapshot, buffers, completions = start(tensors)
    slices = len(snapshot._queue)
    for _ in range({"nothing": 0, "half": slices // 2, "all but one slice": slices - 1}[copied]):
        snapshot.help()
    mutate(tensors[0])
    snapshot.wait()
    touched = completions[0]
    assert same(buffers[1], before[1])
    assert "t1" not in touched
    assert same(buffers[0], before[0]) or touched == ["t0"]
    if mutate is swap_data:
        assert touched == [], "the snapshot keeps the old memory alive, so it is complete"


@pytest.mark.parametrize("seed", range(4))
def test_a_thousand_trials_against_a_busy_trainer(seed: int) -> None:
    """Detect every wrong copy in 250 trials a seed, while the trainer changes, reallocates or swaps tensors at any
    moment."""
    rng = random.Random(seed)
    copier = Copier(1)
    wrong, reported = 0, 0
    for _ in range(250):
        tensors = [
            torch.nn.Parameter(torch.full((rng.choice((20_000, 300_000, 600_000)),), float(i + 1))) for i in range(3)
        ]
        before = [t.detach().clone() for t in tensors]
        snapshot, buffers, completions = start(tensors)
        victim = rng.randrange(3)
        mutate = rng.choice(MUTATIONS)
        copier.start(snapshot)
        for _ in range(rng.randrange(4)):
            snapshot.help()
        if rng.random() < 0.8:
            mutate(tensors[victim])
        snapshot.wait()
        reported += bool(completions[0])
        wrong += sum(not same(b, t) and f"t{i}" not in completions[0] for i, (b, t) in enumerate(zip(buffers, before)))
    copier.close()
    assert wrong == 0
    assert reported > 5, "no trial changed a tensor during its copy"


def test_the_trainer_takes_over_what_is_left() -> None:
    """Copy in the trainer while it waits, so that the snapshot ends without any thread."""
    snapshot, buffers, completions = start([torch.ones(900_000)])
    ended = threading.Thread(target=snapshot.wait)
    ended.start()
    ended.join(20)
    assert not ended.is_alive() and completions == [[]] and snapshot.copied_by_trainer == 4


def test_small_tensors_are_gathered_to_the_byte() -> None:
    """Gather each small tensor to its offset in any slot."""
    tensors = [torch.randn(length) for length in (1, 3, 100, 4000)]
    offsets = [0, 64, 128, 1000]
    gathered = SmallCopies([(t.data_ptr(), t.numel() * 4, offset) for t, offset in zip(tensors, offsets)])
    for _ in range(2):
        slot = (ctypes.c_ubyte * 20_000)()
        gathered.copy(ctypes.addressof(slot))
        for tensor, offset in zip(tensors, offsets):
            assert bytes(slot)[offset : offset + tensor.numel() * 4] == tensor.numpy().tobytes()
