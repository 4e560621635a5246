"""The layout of a state, with the slots that were made for it."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from relight.arena import SEALED, Slot, SlotLayout
from relight.capture import Captured
from relight.capture.capture import TemplateItems
from relight.checkpointer.page_locks import Staging, pinned
from relight.checkpointer.slot_copy_plan import SlotCopyPlan
from relight.commit import SavePlan
from relight.format.collector import collector_paused
from relight.layout import Item
from relight.snapshot import (
    FrozenTensors,
    TensorMarks,
)

_WAYS_MAX = 4


@dataclass(slots=True)
class StateShape:
    """One layout of the state, the slots that were made for it, and copy plans for the state's fixed part."""

    key: tuple[Any, ...]
    plan: SavePlan
    layout: SlotLayout
    slots: list[Slot]
    busy: dict[int, int]
    fixed: TemplateItems | None = None
    rest: tuple[Any, ...] = ()
    copies: dict[tuple[bool, frozenset[int]], SlotCopyPlan] = field(default_factory=dict)
    """Copy plans of the fixed part, by whether some of it is copied while training continues, and by the items that are left out."""
    filled: dict[int, tuple[int, FrozenTensors, TensorMarks]] = field(default_factory=dict)
    """By slot: the save that it has, and the marks of the frozen tensors at that save."""
    staging: Staging = field(default_factory=Staging)
    pinned: frozenset[str] = frozenset()
    """Kinds of accelerators that copy to the slots by DMA, because the slots are pinned."""
    device: torch.device | None = None
    """The accelerator that has some of the state."""
    may_grow: bool = False
    """Whether there is one slot, and a second is allocated once a save is due while the first is not written yet."""

    def is_of(self, state: Captured) -> bool:
        """Return whether the state has this layout. Cheap if its fixed part is the same object."""
        if state.fixed is not None and state.fixed is self.fixed:
            return layout_key(state.items[len(state.fixed.items) :]) == self.rest
        return layout_key(state.items) == self.key

    def copies_of(self, state: Captured, overlap: bool, same: frozenset[int]) -> list[SlotCopyPlan]:
        """Return the plans that copy the state to a slot. The fixed part's plan is computed once. ``same``: items that the slot has."""
        places, packs, locked_for = self.plan.tensors, self.layout.packs, self.pinned
        self.staging.reuse()
        if state.fixed is None:
            return [SlotCopyPlan(state.items, places, packs, overlap, locked_for, self.staging.temporary)]
        count, fixed = len(state.fixed.items), self.plan_fixed(state, overlap, same)
        variable = SlotCopyPlan(state.items[count:], places[count:], packs, overlap, locked_for, self.staging.temporary)
        return [fixed, variable]

    def plan_fixed(self, state: Captured, overlap: bool, same: frozenset[int] = frozenset()) -> SlotCopyPlan:
        """Return the plan of the state's fixed part, which is computed once. The state must have one."""
        assert state.fixed is not None
        count, places = len(state.fixed.items), self.plan.tensors
        if self.fixed is not state.fixed:
            self.fixed, self.rest, self.copies = state.fixed, layout_key(state.items[count:]), {}
        if (overlap, same) not in self.copies:
            if len(self.copies) >= _WAYS_MAX:
                self.copies.clear()
            copied = [number for number in range(count) if number not in same]
            items, kept_places = [state.items[number] for number in copied], [places[number] for number in copied]
            with collector_paused():
                self.copies[overlap, same] = SlotCopyPlan(
                    items, kept_places, self.layout.packs, overlap, self.pinned, pinned
                )
        return self.copies[overlap, same]

    def address(self, index: int) -> int:
        """Return the address of a slot's first byte."""
        return ctypes.addressof(ctypes.c_char.from_buffer(self.slots[index].view))

    def same_there(
        self, index: int, frozen: FrozenTensors, now: TensorMarks, wrong: Callable[[str], None]
    ) -> frozenset[int]:
        """Return the frozen items that the slot still has from its last save. ``wrong`` is called with the name of an item that has
        equal marks and other bytes."""
        number, before, old_marks = self.filled.get(index, (0, None, None))
        if before is not frozen or old_marks is None or self.slots[index].state() != (SEALED, number):
            return frozenset()
        same, base, places = frozen.same(old_marks, now), self.address(index), self.plan.tensors
        mismatch = frozen.wrong(same, lambda i: base + self.layout.packs[places[i].pack] + places[i].offset)
        if mismatch is None:
            return same
        wrong(places[mismatch].name)
        return frozenset()


def layout_key(items: Sequence[Item]) -> tuple[Any, ...]:
    """Return a key that is equal for items with equal layout."""
    return tuple(
        (item.name, item.dtype, item.shape, item.role, item.source.length, item.trainable, item.box) for item in items
    )
