"""Metrics that are recorded after a checkpoint's commit: their NOTE, decoded. Pure."""

from __future__ import annotations

import msgspec

from relight.decode import from_json_bytes
from relight.errors import UnsafeContent
from relight.format.records import Body, Metric, check_metrics
from relight.format.topics import RESULT, ResultNote


def late_metrics(body: Body) -> tuple[str, dict[str, Metric]] | None:
    """Return a checkpoint's id and the metrics that a record adds to it. None if the record is not a result."""
    note = RESULT.read(body)
    return None if note is None else (note.id, metrics_in(note))


def metrics_in(note: ResultNote) -> dict[str, Metric]:
    """Return the metrics of a result. Metrics that are not valid are left out: a newer Relight may have written them."""
    try:
        metrics = from_json_bytes(note.metrics.encode(), dict[str, Metric])
        check_metrics(metrics, note.id)
    except (msgspec.MsgspecError, UnsafeContent):
        return {}
    return metrics
