"""Stages, which are tags that say who moved them and why; and notes, what people write about a checkpoint."""

from __future__ import annotations

import getpass
from collections.abc import Sequence
from typing import Any, NamedTuple

from relight.catalog.branches import STAGE, set_tag
from relight.catalog.run import Run
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.names import STAGES as STAGES
from relight.format.records import WORDS_MAX, Body, NoteBody, TagBody
from relight.log import Checkpoint, History, Log, LogView, fold

NOTE_TOPIC = "note"


class Promotion(NamedTuple):
    """What a stage was moved to: a checkpoint's id, None if it was emptied; by whom, why, and when."""

    stage: str
    id: str | None
    by: str
    why: str
    time: str


class Note(NamedTuple):
    """What somebody wrote about a checkpoint."""

    id: str
    text: str
    by: str
    time: str


def who() -> str:
    """Who says so, as the system knows them; empty if it does not."""
    try:
        return getpass.getuser()[:64]
    except (OSError, KeyError, ImportError):
        return ""


def promote(run: Run, checkpoint: Checkpoint, stage: str | None = None, *, why: str = "", by: str | None = None) -> str:
    """Have ``stage`` be this checkpoint; by default the one behind the highest that it is in. Gives the stage. Cost: one record.

    ``ConfigError`` for a stage that is none, and if it is in the last one already.
    """
    if stage is None:
        stage = next_stage(run.history(), checkpoint.id)
    _move(run, stage, checkpoint.id, by, why)
    return stage


def next_stage(history: History, checkpoint_id: str) -> str:
    """Return the stage after the highest that a checkpoint is in. ``ConfigError`` if that is the last one."""
    held = stages_of(history, checkpoint_id)
    if held and held[-1] == STAGES[-1]:
        raise ConfigError(f"checkpoint {checkpoint_id} is in {STAGES[-1]}, and there is none behind it")
    return STAGES[STAGES.index(held[-1]) + 1] if held else STAGES[0]


def earlier_in(view: LogView, stage: str) -> str:
    """Return the checkpoint that was in a stage before and is still there. ``CheckpointNotFound`` if there is none."""
    history = fold(view)
    moves = [one.id for one in promotions(view.records, _stage(stage)) if one.id is not None]
    now = history.tags.get(stage)
    before = next((one for one in reversed(moves) if one != now and history.find(one)), None)
    if before is None:
        raise CheckpointNotFound(f"nothing was in {stage} before that is still there", where=view.run)
    return before


def take_back(run: Run, stage: str, *, why: str = "", by: str | None = None) -> str:
    """Have ``stage`` be what it was before, of which there is still a checkpoint: its id. ``CheckpointNotFound`` if there is none."""
    view = run.view()
    before = earlier_in(view, stage)
    _move(run, stage, before, by, why or "taken back")
    return before


def clear(run: Run, stage: str, *, why: str = "", by: str | None = None) -> None:
    """Empty a stage; the checkpoint stays. ``CheckpointNotFound`` if nothing is in it. Cost: one record."""
    _move(run, stage, None, by, why)


def promotions(records: Sequence[Any], stage: str | None = None) -> list[Promotion]:
    """Every move of the stages, or of one, oldest first, as the log's records have them."""
    names = STAGES if stage is None else (stage,)
    tags = [(record, record.body) for record in records if isinstance(record.body, TagBody)]
    return [Promotion(body.name, body.id, body.by, body.why, record.time) for record, body in tags if body.name in names]


def stages_of(history: History, checkpoint_id: str) -> list[str]:
    """The stages that a checkpoint is in."""
    return [name for name in STAGES if history.tags.get(name) == checkpoint_id]


def write_note(run: Run, checkpoint: Checkpoint, text: str, *, by: str | None = None) -> None:
    """Say something about a live checkpoint, for good: notes are not taken back. Cost: one record."""
    if not text.strip() or len(text) > WORDS_MAX:
        raise ConfigError(f"a note has 1 to {WORDS_MAX} characters")

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        if history.find(checkpoint.id) is None:
            raise CheckpointNotFound(f"no checkpoint {checkpoint.id}", where=run.name)
        return NoteBody(topic=NOTE_TOPIC, data={"id": checkpoint.id, "text": text, "by": who() if by is None else by}), history.epoch

    log = Log(run.store, run.name)
    log.read()
    log.append(decide)


def notes_of(history: History, checkpoint_id: str | None = None) -> list[Note]:
    """What was written about a checkpoint, or about all, oldest first."""
    found = [
        Note(str(record.body.data.get("id")), str(record.body.data.get("text", "")), str(record.body.data.get("by", "")), record.time)
        for record in history.notes
        if isinstance(record.body, NoteBody) and record.body.topic == NOTE_TOPIC
    ]
    return [one for one in found if checkpoint_id in (None, one.id)]


def _move(run: Run, stage: str, checkpoint_id: str | None, by: str | None, why: str) -> None:
    """The one place that moves a stage."""
    set_tag(Log(run.store, run.name), _stage(stage), checkpoint_id, who() if by is None else by, why, kind=STAGE)


def _stage(name: str) -> str:
    if name not in STAGES:
        raise ConfigError(f"{name[:40]!r} is no stage", hint=f"they are {', '.join(STAGES)}")
    return name
