"""Fresh starts of a run: attempts that began from scratch on purpose, and the job of each."""

from __future__ import annotations

from relight.format.records import Body
from relight.format.topics import FRESH_START, FreshStartNote
from relight.log import Checkpoint, History, Log, LogView, fold


def fresh_starts(history: History) -> list[tuple[int, str]]:
    """Return number and job of each fresh start in the log, in order."""
    return [(record.seq, note.job) for record, note in FRESH_START.among(history.notes)]


def record_fresh_start(log: Log, job: str, epoch: int | None = None) -> None:
    """Append the NOTE of a fresh start. ``epoch``: that of the attempt; None: the current epoch. Cost: one record."""
    note = FRESH_START.note(FreshStartNote(job=job))

    def decide(view: LogView) -> tuple[Body, int]:
        return note, fold(view).epoch if epoch is None else epoch

    log.append(decide)


def carry_fresh_start(near: History, far: History, checkpoint: Checkpoint, log: Log, charge: int) -> None:
    """Append the newest fresh start before ``checkpoint`` to a further tier's log, if that log lacks it.

    The caller copies ``checkpoint`` to that tier next.

    Without it a job that is requeued onto a node with an empty nearest tier would begin from scratch a second time.
    """
    before = [job for seq, job in fresh_starts(near) if seq < checkpoint.seq]
    if before and before[-1] and before[-1] not in [job for _, job in fresh_starts(far)]:
        record_fresh_start(log, before[-1], charge)
