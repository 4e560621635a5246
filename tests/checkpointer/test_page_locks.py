"""Page locks of slots, with CUDA's calls recorded: locked by segments, unlocked before the memory is unmapped."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable

import pytest
import torch

from relight.arena.memory import SharedMapping, allocate
from relight.checkpointer import page_locks
from relight.checkpointer.page_locks import pin_memory
from relight.layout.sources import address_of
from relight.snapshot import device

SIZE = 3 << 20
CUDA = torch.device("cuda", 1)


class Runtime:
    """Records calls of CUDA's runtime. ``refuse`` gives the addresses that cannot be locked."""

    def __init__(self) -> None:
        self.locked: dict[int, int] = {}
        self.current: list[torch.device] = []
        self.refuse: Callable[[int], bool] = lambda address: False
        self.cleared = 0

    def cudaHostRegister(self, address: int, length: int, flags: int) -> int:  # noqa: N802
        assert self.current == [CUDA] and flags == 1 and address not in self.locked
        if self.refuse(address):
            return 2
        self.locked[address] = length
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0

    @contextlib.contextmanager
    def device(self, chosen: torch.device):
        self.current.append(chosen)
        yield
        self.current.pop()


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    """A substitute for CUDA with segments of 1 MiB."""
    made = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: made)
    monkeypatch.setattr(torch.cuda, "device", made.device)
    monkeypatch.setattr(device, "SEGMENT", 1 << 20)

    def clear(element: torch.Tensor) -> None:
        made.cleared += 1

    monkeypatch.setattr(page_locks, "_element", lambda device: torch.zeros(1))
    monkeypatch.setattr(page_locks, "_clear_error", clear)
    return made


def mapping() -> SharedMapping:
    return SharedMapping(allocate(SIZE), SIZE, writable=True)


@pytest.mark.parametrize("way", ["close", "forget"])
def test_memory_is_unlocked_before_it_is_unmapped(runtime: Runtime, way: str) -> None:
    """Memory is unlocked also without close(). Otherwise CUDA would copy old pages for the next mapping at the
    address."""
    memory = mapping()
    base = address_of(memory.view)
    assert pin_memory([memory], CUDA)
    assert runtime.locked == {base + (n << 20): 1 << 20 for n in range(3)}
    if way == "close":
        memory.close()
    del memory
    gc.collect()
    assert runtime.locked == {}


def test_after_a_refusal_all_locks_end_with_their_memory(runtime: Runtime) -> None:
    """The error is taken from CUDA. What was locked before it is unlocked with its memory."""
    first, second = mapping(), mapping()
    runtime.refuse = lambda address: address == address_of(second.view) + (1 << 20)
    assert not pin_memory([first, second], CUDA)
    assert len(runtime.locked) == 4 and runtime.cleared == 1
    first.close()
    second.close()
    assert runtime.locked == {}


def test_a_forked_child_does_not_call_cuda(runtime: Runtime) -> None:
    """The locks are the parent's, and CUDA does not work in a child."""
    memory = mapping()
    assert pin_memory([memory], CUDA)
    child = os.fork()
    if not child:
        memory.close()
        os._exit(len(runtime.locked))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    memory.close()
    assert runtime.locked == {}
