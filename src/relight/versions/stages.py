"""Stages (tags that record who moved them and why) and notes (what people write about a checkpoint)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from relight.audit.audit_log import user
from relight.catalog.branches import STAGE, set_tag
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.names import STAGES as STAGES
from relight.format.records import WORDS_MAX, Body, TagBody
from relight.format.topics import USER_NOTE, UserNote
from relight.log import Checkpoint, History, Log, LogView, fold


class Promotion(NamedTuple):
    """One move of a stage: to a checkpoint's id, or None if it was cleared; author, reason and time."""

    stage: str
    id: str | None
    by: str
    why: str
    time: str


class Note(NamedTuple):
    """A note about a checkpoint."""

    id: str
    text: str
    by: str
    time: str


def promote(run: Run, checkpoint: Checkpoint, stage: str | None = None, *, why: str = "", by: str | None = None) -> str:
    """Move ``stage`` to this checkpoint; by default the stage after its highest one. Return the stage. Cost: one record.

    Raise ``ConfigError`` for an unknown stage, and if the checkpoint is in the last stage already.
    """
    if stage is None:
        stage = next_stage(run.history(), checkpoint.id)
    _move(run, stage, checkpoint.id, by, why)
    return stage


def next_stage(history: History, checkpoint_id: str) -> str:
    """Return the stage after the highest that a checkpoint is in. ``ConfigError`` if that is the last one."""
    stages = stages_of(history, checkpoint_id)
    if stages and stages[-1] == STAGES[-1]:
        raise ConfigError(f"checkpoint {checkpoint_id} is in {STAGES[-1]}, and there is no later stage")
    return STAGES[STAGES.index(stages[-1]) + 1] if stages else STAGES[0]


def earlier_in(view: LogView, stage: str) -> str:
    """Return the checkpoint that was in a stage before and is still there. ``CheckpointNotFound`` if there is none."""
    history = fold(view)
    moves = [move.id for move in promotions(view.records, _stage(stage)) if move.id is not None]
    now = history.tags.get(stage)
    before = next(
        (checkpoint_id for checkpoint_id in reversed(moves) if checkpoint_id != now and history.find(checkpoint_id)),
        None,
    )
    if before is None:
        raise CheckpointNotFound(f"nothing was in {stage} before that is still there", where=view.run)
    return before


def take_back(run: Run, stage: str, *, why: str = "", by: str | None = None) -> str:
    """Move ``stage`` back to its newest earlier checkpoint that is still live. Return its id. Raise ``CheckpointNotFound`` without one."""
    view = run.view()
    before = earlier_in(view, stage)
    _move(run, stage, before, by, why or "taken back")
    return before


def clear(run: Run, stage: str, *, why: str = "", by: str | None = None) -> None:
    """Clear a stage; the checkpoint stays. Raise ``CheckpointNotFound`` if the stage is empty. Cost: one record."""
    _move(run, stage, None, by, why)


def promotions(records: Sequence[Any], stage: str | None = None) -> list[Promotion]:
    """Return every move of all stages, or of one, from the log's records, oldest first."""
    names = STAGES if stage is None else (stage,)
    tags = [(record, record.body) for record in records if isinstance(record.body, TagBody)]
    return [
        Promotion(body.name, body.id, body.by, body.why, record.time) for record, body in tags if body.name in names
    ]


def stages_of(history: History, checkpoint_id: str) -> list[str]:
    """Return the stages that a checkpoint is in."""
    return [name for name in STAGES if history.tags.get(name) == checkpoint_id]


def write_note(run: Run, checkpoint: Checkpoint, text: str, *, by: str | None = None) -> None:
    """Write a note about a live checkpoint. Notes cannot be removed. Cost: one record."""
    if not text.strip() or len(text) > WORDS_MAX:
        raise ConfigError(f"a note has 1 to {WORDS_MAX} characters")

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if history.find(checkpoint.id) is None:
            raise CheckpointNotFound(f"no checkpoint {checkpoint.id}", where=run.name)
        return USER_NOTE.note(UserNote(id=checkpoint.id, text=text, by=user() if by is None else by)), history.epoch

    log = Log(run.store, run.name)
    log.read()
    log.append(decide)


def notes_of(history: History, checkpoint_id: str | None = None) -> list[Note]:
    """Return the notes about a checkpoint, or all notes, oldest first."""
    notes = [Note(note.id, note.text, note.by, record.time) for record, note in USER_NOTE.among(history.notes)]
    return [note for note in notes if checkpoint_id in (None, note.id)]


def _move(run: Run, stage: str, checkpoint_id: str | None, by: str | None, why: str) -> None:
    """Move a stage. All moves are made here."""
    set_tag(Log(run.store, run.name), _stage(stage), checkpoint_id, user() if by is None else by, why, kind=STAGE)


def _stage(name: str) -> str:
    if name not in STAGES:
        raise ConfigError(f"{name[:40]!r} is no stage", hint=f"they are {', '.join(STAGES)}")
    return name
