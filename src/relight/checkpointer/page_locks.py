"""Page-lock host memory, so that an accelerator copies to and from it by itself.

Memory that exists already, such as the slots that the agent maps too, is page-locked by registration. That is a call of the
accelerator's runtime, which torch does not offer for every kind: ``RUNTIMES``. Without it the copies arrive in torch's own
page-locked memory, and the host copies them to the slot.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import NamedTuple

import torch

from relight.arena.memory import PAGE, SharedMapping, allocate
from relight.snapshot import segments

_PORTABLE = 1
"""``cudaHostRegisterPortable``: page-locked for every device, not only the current one."""


class Registration(NamedTuple):
    """How an accelerator's runtime page-locks memory that exists already."""

    lock: Callable[[int, int], int]
    """Lock ``length`` bytes at an address, for all devices. Return 0 on success."""
    unlock: Callable[[int], object]
    """Unlock what was locked at an address."""


def _cuda_lock(address: int, length: int) -> int:
    return int(torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE))  # type: ignore[no-untyped-call]


def _cuda_unlock(address: int) -> int:
    return int(torch.cuda.cudart().cudaHostUnregister(address))  # type: ignore[no-untyped-call]


RUNTIMES: dict[str, Registration] = {"cuda": Registration(_cuda_lock, _cuda_unlock)}
"""By device type: the kinds of accelerators that can page-lock memory that exists. ROCm's type is ``cuda``, too. Written by tests only."""


class Staging:
    """Page-locked host memory in which tensors arrive from an accelerator before they go to the slot. One save at a time uses it."""

    def __init__(self) -> None:
        self._free: list[torch.Tensor] = []
        self._used: list[torch.Tensor] = []

    def reuse(self) -> None:
        """Make the memory that ``temporary`` returned available again, because its save is over."""
        self._free, self._used = [*self._free, *self._used], []

    def temporary(self, size: int, device: torch.device) -> torch.Tensor:
        """Return ``size`` bytes that are valid until ``reuse``."""
        fitting = [memory for memory in self._free if memory.numel() >= size]
        memory = min(fitting, key=torch.Tensor.numel) if fitting else pinned(1 << max(size - 1, 0).bit_length(), device)
        self._free = [free_memory for free_memory in self._free if free_memory is not memory]
        self._used.append(memory)
        return memory[:size]


def pinned(size: int, device: torch.device) -> torch.Tensor:
    """Return new host memory, page-locked for copies from ``device`` if that is possible. It lives as long as the tensor.

    On CUDA it is not torch's own page-locked memory: if the device has failed, freeing that ends the process with SIGABRT.
    """
    if device.type not in RUNTIMES:
        with contextlib.suppress(RuntimeError):  # there is no more page-locked memory
            return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)
    pages = -(-max(size, 1) // PAGE) * PAGE
    memory = SharedMapping(allocate(pages, "relight-staging"), pages, writable=True)
    pin_memory([memory], device)
    return torch.frombuffer(memory.view, dtype=torch.uint8)[:size]


def pin_memory(memories: Iterable[SharedMapping], device: torch.device) -> bool:
    """Page-lock mapped memory for copies from an accelerator. Return whether that succeeded for all of it.

    It stays locked until it is unmapped, however that happens. Memory that is unmapped while it is locked makes CUDA take
    whatever is mapped at that address next for locked memory, and copy the old pages instead of the new ones.

    Threads that have not chosen a device use device 0, on which a registration would create a context of several
    hundred MB for every rank. So ``device`` is made the current one meanwhile.
    """
    runtime = RUNTIMES.get(device.type)
    if runtime is None:
        return False
    with torch.get_device_module(device).device(device):
        element = _element(device)
        if element is None:
            return False
        for memory in memories:
            locked: list[int] = []
            memory.before_unmap(partial(_unlock, os.getpid(), runtime, locked))
            for address, length in segments(memory.view):
                if runtime.lock(address, length) != 0:
                    _clear_error(element)
                    return False
                locked.append(address)
    return True


def _unlock(owner: int, runtime: Registration, locked: Sequence[int]) -> None:
    """Unlock ranges, but not in a forked child: the device cannot be used there, and the locks are the parent's."""
    if os.getpid() == owner:
        for address in locked:
            runtime.unlock(address)


def _element(device: torch.device) -> torch.Tensor | None:
    """Return one element in the device's memory; None if the device is full. ``_clear_error`` must not need memory."""
    with contextlib.suppress(torch.OutOfMemoryError):
        return torch.zeros(1, device=device)
    return None


def _clear_error(element: torch.Tensor) -> None:
    """Take the error of a failed registration from the runtime, which would report it to the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        element.zero_()
