"""Holds: a checkpoint on hold is kept, whatever the retention rules are, until it is released. The log records both, with the reason."""

from __future__ import annotations

from relight.errors import CheckpointNotFound, ConfigError
from relight.format.records import Body, NoteBody
from relight.log import History, Log, LogView, fold
from relight.store import ByteStore

HOLD_TOPIC, RELEASE_TOPIC = "hold", "release"
WHY_MAX = 500


def holds_of(history: History) -> dict[str, str]:
    """Return the reason of each hold, by checkpoint id."""
    holds: dict[str, str] = {}
    for record in history.notes:
        if isinstance(record.body, NoteBody) and record.body.topic in (HOLD_TOPIC, RELEASE_TOPIC):
            checkpoint_id = str(record.body.data.get("id"))
            if record.body.topic == HOLD_TOPIC:
                holds[checkpoint_id] = str(record.body.data.get("why", ""))
            else:
                holds.pop(checkpoint_id, None)
    return holds


def hold(store: ByteStore, run: str, checkpoint_id: str, why: str) -> None:
    """Put a live checkpoint on hold. Raise ``CheckpointNotFound`` if it is not live. Cost: one record."""
    if not why.strip() or len(why) > WHY_MAX:
        raise ConfigError(f"a hold needs a reason, of at most {WHY_MAX} characters")
    _note(store, run, checkpoint_id, {"id": checkpoint_id, "why": why}, HOLD_TOPIC)


def release(store: ByteStore, run: str, checkpoint_id: str, why: str = "") -> None:
    """Release a hold, so that the retention rules decide again. Raise ``CheckpointNotFound`` if there is no such hold."""
    _note(store, run, checkpoint_id, {"id": checkpoint_id, "why": why[:WHY_MAX]}, RELEASE_TOPIC)


def _note(store: ByteStore, run: str, checkpoint_id: str, data: dict[str, str], topic: str) -> None:
    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if topic == HOLD_TOPIC and history.find(checkpoint_id) is None:
            raise CheckpointNotFound(f"no checkpoint {checkpoint_id}", where=run)
        if topic == RELEASE_TOPIC and checkpoint_id not in holds_of(history):
            raise CheckpointNotFound(f"checkpoint {checkpoint_id} is not on hold", where=run)
        return NoteBody(topic=topic, data={**data}), history.epoch

    log = Log(store, run)
    log.read()
    log.append(decide)
