"""Holds: a checkpoint on hold is kept, whatever the retention rules are, until it is released. The log records both, with the reason."""

from __future__ import annotations

from relight.errors import CheckpointNotFound, ConfigError
from relight.format.records import Body
from relight.format.topics import HOLD, RELEASE, HoldNote, Topic
from relight.log import History, Log, LogView, fold
from relight.store import ByteStore

WHY_MAX = 500


def holds_of(history: History) -> dict[str, str]:
    """Return the reason of each hold, by checkpoint id."""
    holds: dict[str, str] = {}
    for record in history.notes:
        if (note := HOLD.read(record.body)) is not None:
            holds[note.id] = note.why
        elif (note := RELEASE.read(record.body)) is not None:
            holds.pop(note.id, None)
    return holds


def hold(store: ByteStore, run: str, checkpoint_id: str, why: str) -> None:
    """Put a live checkpoint on hold. Raise ``CheckpointNotFound`` if it is not live. Cost: one record."""
    if not why.strip() or len(why) > WHY_MAX:
        raise ConfigError(f"a hold needs a reason, of at most {WHY_MAX} characters")
    _note(store, run, HOLD, HoldNote(id=checkpoint_id, why=why))


def release(store: ByteStore, run: str, checkpoint_id: str, why: str = "") -> None:
    """Release a hold, so that the retention rules decide again. Raise ``CheckpointNotFound`` if there is no such hold."""
    _note(store, run, RELEASE, HoldNote(id=checkpoint_id, why=why[:WHY_MAX]))


def _note(store: ByteStore, run: str, topic: Topic[HoldNote], note: HoldNote) -> None:
    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if topic is HOLD and history.find(note.id) is None:
            raise CheckpointNotFound(f"no checkpoint {note.id}", where=run)
        if topic is RELEASE and note.id not in holds_of(history):
            raise CheckpointNotFound(f"checkpoint {note.id} is not on hold", where=run)
        return topic.note(note), history.epoch

    log = Log(store, run)
    log.check_recordable()
    log.read()
    log.append(decide)
