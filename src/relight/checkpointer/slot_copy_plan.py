"""Plan how a state's tensors are copied to a slot: at once or while training continues, from host or accelerator
memory."""

from __future__ import annotations

import contextlib
import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from operator import itemgetter

import torch

from relight.arena.memory import PAGE, SharedMapping, allocate
from relight.capture.tensors import TensorSource
from relight.errors import StoreUnavailable
from relight.format import Tensor
from relight.layout import Item, Source
from relight.layout.sources import copy_from
from relight.snapshot import DeviceCopies, GuardedTensors, Placed, SmallCopies, Streams, segments

OVERLAP_FROM = 16 << 10
"""Smaller tensors in host memory are copied at once: guarding them costs more than copying them."""

_PORTABLE = 1
"""``cudaHostRegisterPortable``: pinned for every device, not only the current one."""

Pin = Callable[[int, torch.device], torch.Tensor]
StreamsOf = Callable[[torch.device], Streams | None]


class SlotCopyPlan:
    """Copy plan of some items: where each goes, and when. Made once for a layout."""

    def __init__(
        self,
        items: Sequence[Item],
        places: Sequence[Tensor],
        packs: Sequence[int],
        overlap: bool,
        streams_of: StreamsOf,
        pin: Pin,
    ) -> None:
        """``places``: the items' positions in the packs. ``packs``: the offset of each pack in a slot. ``pin``: see ``Staging``."""
        later: list[tuple[str, torch.Tensor, int]] = []
        small: list[tuple[int, int, int]] = []
        self._now: list[tuple[Source, int]] = []
        devices: dict[torch.device, tuple[list[Placed], list[Placed]]] = defaultdict(lambda: ([], []))
        for item, place in zip(items, places, strict=True):
            if not place.length:
                continue
            offset = packs[place.pack] + place.offset
            may_wait = overlap and (item.trainable or item.role == "optim")
            live = item.source if isinstance(item.source, TensorSource) else None
            tensor, away = (live.host_tensor, live.device_tensor) if live is not None else (None, None)
            if away is not None and streams_of(away.device) is not None:
                devices[away.device][may_wait].append(Placed(item.name, away, offset))
            elif tensor is not None and may_wait and place.length >= OVERLAP_FROM:
                later.append((item.name, tensor, offset))
            elif tensor is not None and place.length < OVERLAP_FROM:
                small.append((tensor.data_ptr(), place.length, offset))
            else:
                self._now.append((item.source, offset))
        self.later, self._small = GuardedTensors(in_order(later)), SmallCopies(small)
        self.devices = [
            DeviceCopies(now, then, device, streams, pin)
            for device, (now, then) in devices.items()
            if (streams := streams_of(device)) is not None
        ]

    def copy_now(self, view: memoryview, base: int) -> None:
        """Copy the host memory that must not be copied later to the slot ``view``, which starts at address ``base``."""
        self._small.copy(base)
        for source, offset in self._now:
            copy_from(source, 0, view[offset : offset + source.length])


def in_order(placed: Iterable[tuple[str, torch.Tensor, int]]) -> list[tuple[str, torch.Tensor, int]]:
    """Return the tensors in the order of the slot, so that the agent can write them while they are copied."""
    return sorted(placed, key=itemgetter(2))


def written_meanwhile(names: Sequence[str]) -> StoreUnavailable:
    """Return the error for a save, after training has changed tensors before they were copied."""
    shown = ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
    return StoreUnavailable(
        f"training wrote to tensors while they were copied: {shown}",
        hint="the next saves copy before step() returns; call ckpt.barrier() before changing weights outside an optimizer",
    )


class Staging:
    """Page-locked host memory in which small tensors arrive from an accelerator. One save at a time uses it.

    Not torch's own page-locked memory: if the accelerator has failed, freeing that ends the process with SIGABRT.
    """

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
    """Return new host memory, page-locked for copies from ``device`` if that is possible. It lives as long as the tensor."""
    pages = -(-max(size, 1) // PAGE) * PAGE
    memory = SharedMapping(allocate(pages, "relight-staging"), pages, writable=True)
    pin_memory([memory], device)
    return torch.frombuffer(memory.view, dtype=torch.uint8)[:size]


def pin_memory(memories: Iterable[SharedMapping], device: torch.device) -> bool:
    """Page-lock mapped memory for copies from a CUDA device. Return whether that succeeded for all of it.

    It stays locked until it is unmapped, however that happens. Memory that is unmapped while it is locked makes CUDA take
    whatever is mapped at that address next for locked memory, and copy the old pages instead of the new ones.

    Threads that have not chosen a device use device 0, on which a registration would create a context of several
    hundred MB for every rank. So ``device`` is made the current one meanwhile.
    """
    with torch.cuda.device(device):
        for memory in memories:
            locked: list[int] = []
            memory.before_unmap(partial(_unlock, os.getpid(), locked))
            for address, length in segments(memory.view):
                if _register(address, length) != 0:
                    _clear_error(device)
                    return False
                locked.append(address)
    return True


def _register(address: int, length: int) -> int:
    """Page-lock existing memory of this process for all its devices. Return 0 on success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, length, _PORTABLE))  # type: ignore[no-untyped-call]


def _unlock(owner: int, locked: Iterable[int]) -> None:
    """Unlock ranges, but not in a forked child: CUDA cannot be used there, and the locks are the parent's."""
    if os.getpid() == owner:
        for address in locked:
            torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]


def _clear_error(device: torch.device) -> None:
    """Take the error of a failed registration from CUDA, which would report it to the trainer's next kernel."""
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=device)
