"""Recall retired checkpoints, until a SWEEP releases their bytes for deletion.

The log decides: the first of RECALL and SWEEP counts, and no bytes are deleted before their SWEEP was read back. Clocks only decide when a
checkpoint is due. A wrong clock makes the time for a recall shorter or longer, and does no other harm.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from relight.errors import CheckpointNotFound
from relight.format.records import Body, RecallBody, RetireBody, SweepBody
from relight.log import History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.log.superseded import superseded
from relight.log.truncated import refuse_truncated
from relight.reclaim.needs import not_needed, unsure, with_donors
from relight.reclaim.sweep import delete_checkpoints
from relight.store import ByteStore


def due_of(view: LogView, history: History) -> list[str]:
    """Return the ids of checkpoints that can no longer be recalled, by the records' times.

    No record counts as later than the record after it.
    """
    if not history.recallable:
        return []
    now, least = None, float("inf")
    times: dict[int, float] = {}
    for record in reversed(view.records):
        time_s = seconds_since_epoch(record.time)
        least = least if time_s is None else min(least, time_s)
        now = least if now is None else now
        times[record.seq] = least
    due = []
    for checkpoint_id, retired in history.recallable.items():
        assert isinstance(retired.body, RetireBody)
        if now is not None and now - times[retired.seq] >= retired.body.undo_s:
            due.append(checkpoint_id)
    return due


def sweep_recallable(
    store: ByteStore, run: str, ids: Collection[str], *, epoch: int | None = None, log: Log | None = None
) -> tuple[list[str], list[str]]:
    """Append a SWEEP of ``ids`` and delete their bytes. Return directories: ``(deleted, left)``.

    Skips ids that were recalled or swept meanwhile, and donors of checkpoints that stay or are recallable. ``epoch``: the epoch of the
    attempt that sweeps, None for a tool; a superseded attempt gets ``Fenced``. Without ``log``, raise ``CorruptCheckpoint`` if the newest
    records of the run's log were lost.
    """
    if not ids:
        return [], []
    if log is None:
        log = Log(store, run)
        refuse_truncated(store, log)
    swept: list[str] = []

    def decide(view: LogView) -> tuple[Body, int] | None:
        history = fold(view)
        if epoch is not None and history.epoch > epoch:
            raise superseded(history, epoch, run)
        chosen = {checkpoint_id for checkpoint_id in history.recallable if checkpoint_id in ids}
        together = not_needed(history, chosen - unsure(view, history))
        swept[:] = [checkpoint_id for checkpoint_id in history.recallable if checkpoint_id in together]
        return (SweepBody(ids=list(swept)), history.epoch) if swept else None

    if log.append(decide) is None:
        return [], []
    return delete_checkpoints(store, run, fold(log.read()), swept)


def recall(store: ByteStore, run: str, ids: Sequence[str], why: str = "") -> None:
    """Bring retired checkpoints and their donors back into the history, at their former place. Their tags stay removed. Cost: one record.

    Raise ``CheckpointNotFound`` if one of them is not recallable; then none is recalled.
    """

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        for checkpoint_id in ids:
            if checkpoint_id in history.recallable:
                continue
            if checkpoint_id in history.retired:
                raise CheckpointNotFound(f"checkpoint {checkpoint_id} was retired, and its bytes were swept", where=run)
            raise CheckpointNotFound(
                f"no retired checkpoint {checkpoint_id}",
                where=run,
                hint="relight undelete RUN lists what may be recalled",
            )
        return RecallBody(ids=with_donors(history, ids), reason=why), history.epoch

    log = Log(store, run)
    refuse_truncated(store, log)
    log.append(decide)
