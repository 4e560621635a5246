"""The normal end of a run: readers elsewhere learn from the log that no checkpoint will follow."""

from __future__ import annotations

from relight.format.records import Body
from relight.format.topics import RUN_ENDED, RunEndedNote
from relight.log import History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch


def record_end(log: Log, epoch: int, step: int) -> None:
    """Append the NOTE that the attempt ``epoch`` ended normally after ``step``, unless the log states it already or another attempt
    has begun. Cost: one record."""
    note = RUN_ENDED.note(RunEndedNote(step=step))

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        return (note, epoch) if history.epoch == epoch and not has_ended(history) else None

    log.append(decide)


def has_ended(history: History, reported_at: float | None = None) -> bool:
    """Return whether the attempt in charge ended normally: by the save of its last step, or by a NOTE after the newest checkpoint.

    ``reported_at``: when a process of the run reported its normal end, as a Unix time. If an attempt has begun since, on any machine,
    that report is about an earlier attempt.
    """
    if reported_at is not None:
        begun_at = seconds_since_epoch(history.fences[-1].time) if history.fences else None
        if begun_at is None or begun_at <= reported_at:
            return True
    newest = history.live[-1] if history.live else None
    if newest is not None and newest.epoch == history.epoch and newest.body.save_reason.kind == "end":
        return True
    since = newest.seq if newest is not None else -1
    return any(record.epoch == history.epoch and record.seq > since for record, _ in RUN_ENDED.among(history.notes))
