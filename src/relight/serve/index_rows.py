"""Rows and pages of the index, computed from checkpoints, records and incidents. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from relight.catalog.branches import PREFIX
from relight.errors import ConfigError
from relight.format import DTYPES, Record
from relight.format.records import CommitBody, NoteBody, TagBody
from relight.log import Checkpoint, History, LogView
from relight.log.record_text import record_text
from relight.run_records.verification import VerificationResult
from relight.serve.scope import everything, masked, reaches
from relight.serve.values import CheckpointRow, IncidentRow, LogRow, RunRow, TensorRow

WEEK_S = 7 * 86400.0
T = TypeVar("T")


def full_at(trend: Sequence[tuple[float, float]], free: int | None, now: float) -> float | None:
    """Return when no byte is free, at the rate of the last week. None if the store does not grow, or its free space is unknown."""
    recent = [point for point in trend if point[0] >= now - WEEK_S]
    if free is None or len(recent) < 2:
        return None
    span, grew = recent[-1][0] - recent[0][0], recent[-1][1] - recent[0][1]
    return now + free * span / grew if span > 0 and grew > 0 else None


def page_of(
    rows: Sequence[T],
    keys: Sequence[str],
    after: str | None,
    limit: int,
    *,
    reverse: bool = False,
    known: Callable[[str], str] = str,
) -> tuple[list[T], str | None]:
    """Return the rows after the key ``after``, and the key of the last one if more follow.

    ``keys`` are sorted. The row of ``after`` may have been deleted since.
    """
    start = 0
    if after:
        start = sum((key >= known(after)) if reverse else (key <= known(after)) for key in keys)
    picked = list(rows[start : start + limit])
    return picked, keys[start + limit - 1] if start + limit < len(rows) and picked else None


SORTS = {
    "run": "run", "state": "state", "step": "last_step", "age": "age_s", "duration": "duration_s", "host": "host", "goodput": "goodput",
    "risk": "risk", "checkpoints": "checkpoints", "size": "bytes",
}  # fmt: skip
"""Fields by which runs can be sorted, by name."""


def sorted_runs(rows: Sequence[RunRow], sort: str) -> list[RunRow]:
    """Return runs sorted by a name in ``SORTS``, or by ``metric:NAME``; with ``-`` before it the largest first.

    Runs without the value are the last. An unknown name sorts by the run's name.
    """
    name = sort.removeprefix("-")

    def value(row: RunRow) -> Any:
        if name.startswith("metric:"):
            return row.metrics.get(name.removeprefix("metric:"))
        return getattr(row, SORTS.get(name, "run"))

    known = [row for row in rows if value(row) not in (None, "")]
    known.sort(key=value, reverse=sort.startswith("-"))
    return [*known, *(row for row in rows if value(row) in (None, ""))]


def sequence_number(text: str) -> str:
    """Return a position in a list as a key that sorts by number."""
    if not text.isascii() or not text.isdecimal() or len(text) > 12:
        raise ConfigError(
            f"{text[:40]!r} is not a position in this list", hint="take the value of next from the piece before"
        )
    return text.zfill(12)


def log_rows(view: LogView, history: History) -> list[LogRow]:
    """Return the records of a run's log, newest first. Records without effect that a summary replaces are left out."""
    void = {record.seq: f"void: {why}" for record, why in history.void}
    rows = [
        LogRow(record.seq, record.time, record.kind, _record_text(record), masked(void.get(record.seq, "")))
        for record in view.records
    ]
    faults = [LogRow(each.seq, None, "damaged", each.file, masked(each.reason)) for each in view.faults]
    return sorted([*rows, *faults], key=lambda row: -row.seq)


def _record_text(record: Record) -> str:
    """Return a record's content. A caller with a scope does not get the parts that may name other runs."""
    body = record.body
    if not everything():
        if isinstance(body, NoteBody):
            return body.topic
        if isinstance(body, TagBody) and body.name.startswith(PREFIX):
            return "a branch"
        if isinstance(body, CommitBody) and (body.home or body.save_reason.kind in ("branch", "average", "import")):
            return f"{body.id} step {body.step}"
    return masked(record_text(record))


def checkpoint_row(
    checkpoint: Checkpoint, tags: Sequence[str], set_aside: set[str], known: VerificationResult | None
) -> CheckpointRow:
    """Return the row of a checkpoint. ``known``: damage that a verification found."""
    state, why = "good", ""
    if known is not None:
        state, why = "damaged", f"damaged: {masked(known.damage)} (found by {known.by})"
    elif checkpoint.body.suspect:
        state, why = "suspect", "suspect: when it was saved, ranks differed in what they should have in common"
    elif checkpoint.id in set_aside:
        state, why = "rolled back", "rolled back: training continued from an earlier checkpoint"
    size = checkpoint.body.stored_bytes
    return CheckpointRow(checkpoint.id, checkpoint.step, checkpoint.time, size, None, not why, tags, why, state)


def masked_incident(incident: IncidentRow) -> IncidentRow:
    """Return an incident without names of runs outside the caller's scope."""
    return replace(
        incident,
        why=masked(incident.why),
        reason=masked(incident.reason),
        words=masked(incident.words),
        clues=[tuple(masked(cell) if isinstance(cell, str) else cell for cell in clue) for clue in incident.clues],
        stacks={name: masked(text) for name, text in incident.stacks.items()},
        workers=[_masked_worker(worker) for worker in incident.workers],
    )


def _masked_worker(worker: Mapping[str, Any]) -> dict[str, Any]:
    tail = worker.get("tail")
    lines = [masked(str(line)) for line in tail] if isinstance(tail, list) else []
    return {**worker, "error": masked(str(worker.get("error", ""))), "tail": lines}


def tags_by_id(store: str, tags: dict[str, str]) -> dict[str, list[str]]:
    """Return the tags of each checkpoint, without branch tags of runs outside the caller's scope."""
    names: dict[str, list[str]] = {}
    for name, target in sorted(tags.items()):
        if not name.startswith(PREFIX) or reaches(store, name.removeprefix(PREFIX)):
            names.setdefault(target, []).append(name)
    return names


def tensor_row(tensor: Any, codec: str | None, ratio: float) -> TensorRow:
    """Return the row of a tensor."""
    return TensorRow(tensor.name, tensor.shape, tensor.dtype, bytes_of(tensor.shape, tensor.dtype), codec, ratio)


def bytes_of(shape: Sequence[int], dtype: str) -> int:
    """Return the size in bytes of a tensor."""
    size: int = DTYPES[dtype].itemsize
    for length in shape:
        size *= length
    return size


def place_of(on: str) -> tuple[str, str]:
    """Return store and run of an audit entry's object."""
    store, _, run = on.partition("/")
    return store, run.partition("@")[0]


def short_value(value: Any) -> Any:
    """Return a value for a table: a long text is shortened."""
    return value if value is None or isinstance(value, int | float | bool) else str(value)[:200]
