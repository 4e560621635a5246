"""State of one record number of a log: its file, and what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from relight.format import Record
from relight.format.digest import ZERO_HEX


@dataclass(slots=True)
class Slot:
    """State of one record number: the hash of its file, and the record, or what is wrong with it."""

    file_hash: str | None
    record: Record | None
    reason: str = ""
    unreadable: bool = False
    """The store failed to read it now. It may be a good record, so no record may be appended after it."""


def recorded_run(slots: Mapping[int, Slot]) -> str:
    """Return the run's id in record 0, if record 1 is chained to it; else the most common id of the records."""
    first, second = slots.get(0), slots.get(1)
    if first and first.record and second and second.record and second.record.prev == first.file_hash:
        return first.record.run
    return most_common([slot.record.run for slot in slots.values() if slot.record])


def recorded_store(slots: Mapping[int, Slot]) -> str:
    """Return the store's id in record 0, if record 1 is chained to it; else the id in all records. Return an empty text if they differ.

    A later record that names another store does not count: it would hide all others.
    """
    first, second = slots.get(0), slots.get(1)
    if first and first.record and second and second.record and second.record.prev == first.file_hash:
        return first.record.store
    stores = {slot.record.store for slot in slots.values() if slot.record}
    return stores.pop() if len(stores) == 1 else ""


def why_void(slot: Slot, store_id: str, run_id: str, following: Record | None) -> str:
    """Return why the record in a slot is invalid; empty if it is valid. ``following``: the next record, if that is valid."""
    if slot.record is None:
        return slot.reason
    if slot.record.store != store_id:
        return "the record belongs to another store"
    if slot.record.run != run_id:
        return "the record belongs to another run"
    if slot.record.seq == 0 and slot.record.prev != ZERO_HEX:
        return "the first record claims one before it"
    if following is not None and following.prev != slot.file_hash:
        return "the bytes are not those the next record was chained to"
    return ""


def most_common(values: list[str]) -> str:
    """Return the most frequent value, the smallest of several; empty if there are no values."""
    return max(sorted(set(values)), key=values.count, default="")
