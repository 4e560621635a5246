"""Plan how a state's tensors are copied to a slot: at once or while training continues, from host or accelerator
memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from operator import itemgetter
from typing import Any

import torch

from relight.format import Tensor
from relight.layout import Item, Source
from relight.layout.sources import copy_from
from relight.snapshot import DeviceCopies, GuardedTensors, Placed, SmallCopies, Streams, segments

OVERLAP_FROM = 16 << 10
"""Smaller tensors in host memory are copied at once: guarding them costs more than copying them."""

StreamsOf = Callable[[torch.device], Streams | None]


class SlotCopyPlan:
    """Copy plan of some items: where each goes, and when. Made once for a layout."""

    def __init__(self, items: Sequence[Item], places: Sequence[Tensor], packs: Sequence[int], overlap: bool, streams_of: StreamsOf) -> None:
        """``places``: the items' positions in the packs. ``packs``: the offset of each pack in a slot."""
        later: list[tuple[str, torch.Tensor, int]] = []
        small: list[tuple[int, int, int]] = []
        self._now: list[tuple[Source, int]] = []
        devices: dict[torch.device, tuple[list[Placed], list[Placed]]] = defaultdict(lambda: ([], []))
        for item, place in zip(items, places, strict=True):
            if not place.length:
                continue
            offset = packs[place.pack] + place.offset
            may_wait = overlap and (item.trainable or item.role == "optim")
            tensor: Any = getattr(item.source, "host_tensor", None)
            away: Any = getattr(item.source, "device_tensor", None)
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
            DeviceCopies(now, then, device, streams, pinned)
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


def pinned(size: int) -> torch.Tensor:
    """Return page-locked host memory, to which an accelerator copies by DMA."""
    return torch.empty(size, dtype=torch.uint8, device="cpu", pin_memory=True)


def register(address: int, length: int) -> int:
    """Page-lock existing memory of this process. Return 0 on success."""
    return int(torch.cuda.cudart().cudaHostRegister(address, length, 0))  # type: ignore[no-untyped-call]


def unregister(view: memoryview) -> None:
    """Unlock the memory that ``pin_slot`` has pinned."""
    for address, _ in segments(view):
        torch.cuda.cudart().cudaHostUnregister(address)  # type: ignore[no-untyped-call]
