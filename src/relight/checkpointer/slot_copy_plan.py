"""Plan how a state's tensors are copied to a slot: at once or while training continues, from host or accelerator
memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from operator import itemgetter

import torch

from relight.capture.accelerator import copies_are_queued
from relight.capture.tensors import TensorSource
from relight.checkpointer.page_locks import RUNTIMES
from relight.errors import StoreUnavailable
from relight.format import Tensor
from relight.layout import Item, Source
from relight.layout.sources import copy_from
from relight.snapshot import DeviceCopies, GuardedTensors, Placed, SmallCopies

OVERLAP_FROM = 16 << 10
"""Smaller tensors in host memory are copied at once: guarding them costs more than copying them."""

Pin = Callable[[int, torch.device], torch.Tensor]


class SlotCopyPlan:
    """Copy plan of some items: where each goes, and when. Made once for a layout."""

    def __init__(
        self,
        items: Sequence[Item],
        places: Sequence[Tensor],
        packs: Sequence[int],
        overlap: bool,
        locked_for: Collection[str],
        pin: Pin,
    ) -> None:
        """``places``: the items' positions in the packs. ``packs``: the offset of each pack in a slot. ``locked_for``: the device
        types that the slot is page-locked for. ``pin``: see ``Staging``."""
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
            if away is not None and _overlaps(away.device, locked_for):
                devices[away.device][may_wait].append(Placed(item.name, away, offset))
            elif tensor is not None and may_wait and place.length >= OVERLAP_FROM:
                later.append((item.name, tensor, offset))
            elif tensor is not None and place.length < OVERLAP_FROM:
                small.append((tensor.data_ptr(), place.length, offset))
            else:
                self._now.append((item.source, offset))
        self.later, self._small = GuardedTensors(in_order(later)), SmallCopies(small)
        self.devices = [
            DeviceCopies(now, then, device, pin, in_place=device.type in locked_for)
            for device, (now, then) in devices.items()
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


def _overlaps(device: torch.device, locked_for: Collection[str]) -> bool:
    """Return whether copies from the device run while training continues: to the slot, or to page-locked memory of torch's.

    If the runtime can page-lock slots and has refused to, there is no page-locked memory left.
    """
    return device.type in locked_for or (device.type not in RUNTIMES and copies_are_queued(device))
