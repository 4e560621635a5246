"""Results of evaluations: metrics that are recorded after a checkpoint's commit, or why there are none.

A result is a NOTE of the run's log. Its metrics count as the checkpoint's own: for ``best:METRIC``, for retention, in listings and charts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from relight.errors import CheckpointNotFound, ConfigError, shown
from relight.format.records import Body, Metric, metric_of
from relight.format.topics import RESULT, ResultNote
from relight.log import History, Log, LogView, fold
from relight.log.identity import check_recordable
from relight.log.late_metrics import metrics_in
from relight.store import ByteStore

METRICS_MAX = 1000
"""Largest number of metrics in a result."""
NAME_MAX = 200
"""Characters of a metric's name, and of an evaluation's."""
WHY_MAX = 500


class EvaluationResult(NamedTuple):
    """A result for a checkpoint. ``by``: name of the evaluation, which is empty for a result without a name."""

    id: str
    by: str
    metrics: Mapping[str, Metric] = {}
    failed: str = ""
    """Why the evaluation failed; empty if it succeeded."""
    skipped: str = ""
    """Why there was no evaluation."""
    seconds: float | None = None


def results_of(history: History, by: str | None = None) -> list[EvaluationResult]:
    """Return the results of the known checkpoints, oldest first. ``by``: those of that evaluation alone."""
    known = {**history.retired, **history.by_id}
    return [
        EvaluationResult(note.id, note.by, metrics_in(note), note.failed or "", note.skipped or "", note.seconds)
        for record, note in RESULT.among(history.notes)
        if by in (None, note.by) and note.id in known and known[note.id].seq < record.seq
    ]


def check_result_metrics(metrics: object) -> dict[str, Metric]:
    """Return the metrics as records hold them. Raise ``ConfigError`` unless they are numbers by name."""
    if not isinstance(metrics, Mapping) or len(metrics) > METRICS_MAX:
        wanted = f"a dict of at most {METRICS_MAX} numbers by name"
        raise ConfigError(f"metrics must be {wanted}, not {shown(metrics)}", where="metrics", hint='{"accuracy": 0.9}')
    checked: dict[str, Metric] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not 0 < len(name) <= NAME_MAX or not name.isprintable():
            allowed = f"a printable text of 1 to {NAME_MAX} characters"
            raise ConfigError(f"a metric's name must be {allowed}, not {shown(name)}", where="metrics")
        checked[name] = metric_of(_number(name, value))
    return checked


def check_evaluation_name(name: object, where: str) -> str:
    """Return the name. Raise ``ConfigError`` unless a record can hold it whole: a shortened name would not be found again."""
    if not isinstance(name, str) or len(name) > NAME_MAX or not name.isprintable():
        what = f"a name is a text of at most {NAME_MAX} printable characters, not {shown(name)}"
        raise ConfigError(what, where=where, hint="choose a short name, such as accuracy")
    return name


def _number(name: str, value: object) -> float:
    """Return a number, or the number in a scalar of another library, such as a tensor of one element."""
    if isinstance(value, (int, float)):
        if isinstance(value, int) and abs(value) >= 1 << 63:  # more than a record holds as an integer
            return float(value) if abs(value) < 1 << 1023 else math.inf
        return int(value) if isinstance(value, bool) else value
    try:
        if not isinstance(value, str) and value is not None:
            return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, RuntimeError):
        pass
    raise ConfigError(f"metric {name!r} is not a number: {shown(value)}", where=f"metric {name}")


def record_result(store: ByteStore, run: str, result: EvaluationResult) -> bool:
    """Record a result. Return whether this call recorded it: False if there is a result of that name for the checkpoint.

    A result without a name is always recorded. Raise ``CheckpointNotFound`` for a checkpoint that the log does not know.
    Raise ``ConfigError`` for a name that is too long, and if this process does not trust its own records.
    After ``Uncertain``, call it again. Cost: one record.
    """
    check_evaluation_name(result.by, "the evaluation's name")
    check_recordable(store)
    text = msgspec.json.encode(result.metrics).decode()
    note = RESULT.note(
        ResultNote(
            id=result.id,
            metrics=text,
            by=result.by,
            failed=result.failed[:WHY_MAX] or None,
            skipped=result.skipped[:WHY_MAX] or None,
            seconds=result.seconds,
        )
    )

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        if result.id not in history.committed_ids:
            raise CheckpointNotFound(f"no checkpoint {result.id}", where=run)
        if result.by and any(other.id == result.id for other in results_of(history, result.by)):
            return None
        return note, history.epoch

    log = Log(store, run)
    log.read()
    return log.append(decide) is not None


def carry_results(near: History, far: History, log: Log, epoch: int) -> None:
    """Append the results of ``near``, a nearer tier, that a further tier's ``log`` lacks for its checkpoints. Cost: a record for each.

    Without them, retention and ``best`` of that tier would not know the metrics.
    """
    far_ids = {checkpoint.original_id: checkpoint.id for checkpoint in far.live}
    known = {**near.retired, **near.by_id}
    have: dict[str, list[EvaluationResult]] = {}
    for result in results_of(far):
        have.setdefault(result.id, []).append(result._replace(seconds=None))
    for _, note in RESULT.among(near.notes):
        target = far_ids.get(known[note.id].original_id) if note.id in known else None
        if target is None:
            continue
        carried = EvaluationResult(target, note.by, metrics_in(note), note.failed or "", note.skipped or "")
        if carried not in have.setdefault(target, []):
            have[target].append(carried)
            body = RESULT.note(msgspec.structs.replace(note, id=target))
            log.append(lambda _, body=body: (body, epoch))  # type: ignore[misc]
