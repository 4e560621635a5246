"""Errors of a log that was moved, deleted or replaced while a process appends to it."""

from __future__ import annotations

from relight.errors import CorruptCheckpoint, RunRemoved, RunReplaced, StoreUnavailable
from relight.log.history import History
from relight.log.slots import Slot
from relight.store import ByteStore

_BACK = "move the trained directory back; or stop, and start again to continue from the directory that is there now"


def other_runs_records(store: ByteStore, run: str) -> CorruptCheckpoint:
    """Return the error of a log with records of another store or run only."""
    return CorruptCheckpoint(
        "none of this run's records belongs to this store and run",
        where=f"{store.url}/{run}",
        hint="relight.json was replaced, or the run was copied here from another store",
    )


def without_store_id(store: ByteStore) -> CorruptCheckpoint:
    """Return the error of a store that neither ``relight.json`` nor the run's log has an id of."""
    return CorruptCheckpoint(
        "relight.json is damaged, and this run has no log with the store's id",
        where=store.url,
        hint="restore relight.json from a copy, or choose another directory",
    )


def removed(store: ByteStore, run: str) -> RunRemoved:
    """Return the error of a log that has no record any more."""
    hint = "move it back; or stop, and start again where it is now"
    hint += "; or begin a new log there: on_failure=relight.failure_policy(begin_again=True)"
    return RunRemoved("the run's log is gone: its directory was moved or deleted", where=_place(store, run), hint=hint)


def refuse_other_record(store: ByteStore, run: str, seq: int, known_hash: str, slot: Slot) -> None:
    """Raise ``RunReplaced`` if the last record that this process knows is gone, or has other bytes.

    ``slot``: the record that is stored now. A damaged record proves nothing. Raise ``StoreUnavailable`` if it cannot be
    read now.
    """
    if slot.unreadable:
        raise StoreUnavailable(
            f"the last record of the log cannot be read just now: {slot.reason}", where=f"{run}, record {seq}"
        )
    if slot.file_hash == known_hash or (slot.file_hash is not None and slot.record is None):
        return
    state = "is not in its log" if slot.file_hash is None else "is another one in its log"
    what = f"the run's directory was replaced, as by an older copy: record {seq}, which this process has read or written, {state}"
    raise RunReplaced(what, where=_place(store, run), hint=_BACK)


def replaced_attempt(history: History, epoch: int, run: str) -> RunReplaced:
    """Return the error of attempt ``epoch`` if its FENCE is not in the log."""
    what = f"the run's directory was replaced, as by an older copy: attempt {epoch} is not in its log, which ends with attempt"
    return RunReplaced(f"{what} {history.epoch}", where=run, hint=_BACK)


def _place(store: ByteStore, run: str) -> str:
    return f"{store.url.rstrip('/')}/{run}"
