"""Answers of bounded length: lists are cut to one piece, with the position of the next piece. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, TypeVar

import msgspec

from relight.errors import ConfigError
from relight.serve.curves import thinned_points
from relight.serve.values import (
    AuditRow,
    CheckpointDetail,
    DiffDetail,
    IncidentRow,
    LineageRow,
    ListPage,
    RunDetail,
    RunRow,
    StorageDetail,
)

STEPS_MAX, TAGS_MAX, LISTED_MAX = 500, 100, 500
POINTS_MAX = 24_000
"""Points of all curves of a run together in one answer."""
LINES_MAX, LINE_MAX = 3, 300
AUDIT_FIELDS_BYTES, AUDIT_VALUE_BYTES = 1000, 200
"""Bytes of JSON for all fields of an audit entry in a list, and for one value: 500 entries are less than 1 MB."""
T = TypeVar("T")


def piece_of(rows: Sequence[T], after: str | None, limit: int) -> tuple[list[T], str | None]:
    """Return ``limit`` rows from the position ``after`` on, and the position of the next piece, None at the end."""
    if after and not (after.isascii() and after.isdecimal() and len(after) < 12):
        raise ConfigError(
            f"{after[:40]!r} is not a position in this list", hint="take the value of next from the piece before"
        )
    end = int(after or 0) + limit
    return list(rows[end - limit : end]), str(end) if end < len(rows) else None


def checkpoint_piece(detail: CheckpointDetail, after: str | None, limit: int, find: str = "") -> CheckpointDetail:
    """Return the checkpoint with one piece of its tensors, of those with ``find`` in their path."""
    matching = [tensor for tensor in detail.tensors if find in tensor.path] if find else detail.tensors
    tensors, more = piece_of(matching, after, limit)
    return replace(detail, tensors=tensors, next=more, total=len(matching))


def diff_piece(detail: DiffDetail, after: str | None, limit: int, changed: bool = False) -> DiffDetail:
    """Return the difference with one piece of the tensors and of the values at the same positions. ``changed``: omit equal tensors."""
    chosen = [tensor for tensor in detail.tensors if tensor.kind != "same"] if changed else detail.tensors
    tensors, more = piece_of(chosen, after, limit)
    values, more_values = piece_of(detail.values, after, limit)
    return replace(
        detail,
        tensors=tensors,
        values=values,
        next=more or more_values,
        total=len(chosen),
        values_total=len(detail.values),
    )


def lineage_piece(rows: Sequence[LineageRow], after: str | None, limit: int) -> ListPage[LineageRow]:
    """Return one piece of the runs, each with its newest steps and tags."""
    picked, more = piece_of(rows, after, limit)
    return ListPage(
        [replace(row, steps=row.steps[-STEPS_MAX:], tags=row.tags[-TAGS_MAX:]) for row in picked], more, len(rows)
    )


def bounded_run(detail: RunDetail) -> RunDetail:
    """Return a run with only as many curve points, incidents, tags and branches as fit in one answer.

    The newest are kept. Incidents have no evidence.
    """
    series = dict(sorted(detail.series.items(), key=lambda item: (item[0] != "loss", item[0]))[:LISTED_MAX])
    most = max(1, POINTS_MAX // max(1, len(series)))
    return replace(
        detail,
        series={name: list(thinned_points(dict(points), most).items()) for name, points in series.items()},
        incidents=[bare(incident) for incident in detail.incidents[:TAGS_MAX]],
        tags=detail.tags[-LISTED_MAX:],
        branches=detail.branches[-LISTED_MAX:],
    )


def short_run(row: RunRow) -> RunRow:
    """Return a run for a list: with at most 20 metrics and 20 values of its configuration. Its own answer has all."""
    return replace(row, metrics=dict(islice(row.metrics.items(), 20)), config=dict(islice(row.config.items(), 20)))


def bounded_storage(detail: StorageDetail) -> StorageDetail:
    """Return a store with a retention plan that fits in one answer."""
    return replace(detail, retention=detail.retention[:LISTED_MAX], retention_total=len(detail.retention))


def bare(row: IncidentRow) -> IncidentRow:
    """Return an incident for a list: without stacks, last words, workers and clues, which only its own answer has."""
    return replace(row, clues=(), stacks={}, words="", workers=())


def short_task(shown: dict[str, Any]) -> dict[str, Any]:
    """Return a task for a list: its last lines, shortened. Its own answer has all lines."""
    lines = [line[:LINE_MAX] for line in shown["lines"][-LINES_MAX:]]
    return shown | {"lines": lines, "says": shown["says"][:LINE_MAX], "details": shown["details"][:LINE_MAX]}


def short_audit(row: AuditRow) -> AuditRow:
    """Return an audit entry for a list: long values are shortened. ``relight log --audit`` prints the whole entry."""
    fields, bytes_left = dict[str, str](), AUDIT_FIELDS_BYTES
    for name, value in row.fields.items():
        if not value:
            fields[name] = value
            bytes_left -= _size(name) + 4
            continue
        name, value = fitting(name, 100), fitting(value, AUDIT_VALUE_BYTES)
        if (bytes_left := bytes_left - _size(name) - _size(value) - 2) < 0:
            fields["…"] = f"{len(row.fields) - len(fields)} more"
            break
        fields[name] = value
    return replace(
        row,
        fields=fields,
        who=fitting(row.who, 100),
        what=fitting(row.what, 60),
        on=fitting(row.on, 300),
        role=fitting(row.role, 20),
        token=fitting(row.token, 20),
    )


def fitting(text: str, most: int) -> str:
    """Return ``text``, shortened to at most ``most`` bytes of JSON. An ellipsis marks a shortened text."""
    if _size(text) <= most:
        return text
    text = text[:most]
    while text and (size := _size(text) + 3) > most:
        text = text[: min(len(text) - 1, len(text) * most // size)]
    return f"{text}…"


def _size(text: str) -> int:
    return len(msgspec.json.encode(text))


def thinned(points: Sequence[T], most: int) -> list[T]:
    """Return at most ``most`` evenly spaced points, including the last one."""
    every = -(-len(points) // most)
    return list(points[::-1][:: max(1, every)])[::-1]
