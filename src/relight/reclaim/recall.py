"""Between retired and gone: what may be recalled, until a SWEEP gives up its bytes.

The log decides: whichever of RECALL and SWEEP comes first holds, and nothing is deleted before its SWEEP was read back. Clocks only say
when one is due: a wrong one makes the time in which something may be recalled shorter or longer, and costs nothing else.
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
    """What may be swept: its time is over, by the records' times, none of which counts for later than the record behind it."""
    if not history.recallable:
        return []
    now, least = None, float("inf")
    times: dict[int, float] = {}
    for record in reversed(view.records):
        time_s = seconds_since_epoch(record.time)
        least = least if time_s is None else min(least, time_s)
        now = least if now is None else now
        times[record.seq] = least
    found = []
    for checkpoint_id, retired in history.recallable.items():
        assert isinstance(retired.body, RetireBody)
        if now is not None and now - times[retired.seq] >= retired.body.undo_s:
            found.append(checkpoint_id)
    return found


def sweep_recallable(
    store: ByteStore, run: str, ids: Collection[str], *, epoch: int | None = None, log: Log | None = None
) -> tuple[list[str], list[str]]:
    """Give up ``ids``, but for those recalled or swept meanwhile, and for those whose bytes another needs that stays or may be recalled;
    and delete their bytes: ``(deleted, left)``, as directories.

    ``epoch``: the attempt's that does it, None for a tool; a superseded attempt gets ``Fenced``. Without ``log``,
    ``CorruptCheckpoint`` if the newest records of the run's log were lost.
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
        together = not_needed(history, {one for one in history.recallable if one in ids} - unsure(view, history))
        swept[:] = [one for one in history.recallable if one in together]
        return (SweepBody(ids=list(swept)), history.epoch) if swept else None

    if log.append(decide) is None:
        return [], []
    return delete_checkpoints(store, run, fold(log.read()), swept)


def recall(store: ByteStore, run: str, ids: Sequence[str], why: str = "") -> None:
    """Bring retired checkpoints back into the history, at the place they had, and with them those whose bytes they need; their tags do
    not come back. Cost: one record.

    ``CheckpointNotFound`` if one of them is not there to be recalled: then none is.
    """

    def decide(view: LogView) -> tuple[Body, int]:
        history = fold(view)
        for one in ids:
            if one in history.recallable:
                continue
            if one in history.retired:
                raise CheckpointNotFound(f"checkpoint {one} was retired, and its bytes were given up", where=run)
            raise CheckpointNotFound(f"no retired checkpoint {one}", where=run, hint="relight undelete RUN lists what may be recalled")
        return RecallBody(ids=with_donors(history, ids), reason=why), history.epoch

    log = Log(store, run)
    refuse_truncated(store, log)
    log.append(decide)
