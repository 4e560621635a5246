"""Shared memory for snapshots: memfds, their mappings, and the header of a slot. Torch-free."""

from relight.arena.memory import (
    PAGE,
    SharedMapping,
    adopt,
    allocate,
    available_bytes,
    freeze,
    is_frozen,
    reading,
    room_for,
)
from relight.arena.slot import BODY_OFFSET, EMPTY, FILLING, SEALED, Slot, SlotLayout, lay_out

__all__ = [
    "BODY_OFFSET",
    "EMPTY",
    "FILLING",
    "PAGE",
    "SEALED",
    "SharedMapping",
    "Slot",
    "SlotLayout",
    "adopt",
    "allocate",
    "available_bytes",
    "freeze",
    "is_frozen",
    "lay_out",
    "reading",
    "room_for",
]
