"""Retention, tags, and the removal of what unfinished saves have left."""

from __future__ import annotations

from collections.abc import Sequence

from relight.catalog.branches import tag_if_possible
from relight.catalog.tiers import Further
from relight.checkpointer.hooks import CommittedSave, Hook
from relight.commit import Attempt, CommitTarget
from relight.errors import Fenced, RelightError
from relight.log import History
from relight.observe import emit
from relight.policy import Keep
from relight.reclaim import execute_sweep, plan_sweep, prune_a_share
from relight.restore.result import Resumed
from relight.run_records.verification import record_checked
from relight.store import ByteStore


class Retention(Hook):
    """Retention of a run, on rank 0. The agent applies it after its own saves."""

    def __init__(self, keep: Keep, leads: bool, further: Sequence[Further]) -> None:
        """``leads``: whether this is rank 0. ``further``: the further tiers, in which damaged copies are recorded, too."""
        self._keep, self._leads, self._further = keep, leads, further
        self._attempt: Attempt | None = None
        self._resumed: Resumed | None = None
        self._verified: dict[str, bool] = {}
        """Whether a checkpoint verifies, by id, as far as this process has found out."""

    def on_restore(self, resumed: Resumed, start: int, checkpoint_id: str | None) -> None:
        """Remember which checkpoints the restore could not read."""
        self._resumed = resumed
        self._verified.update(dict.fromkeys(resumed.damaged, False))

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Record the damage that the restore found, and delete what unfinished saves have left."""
        self._attempt = attempt if self._leads else None
        if self._attempt is not None:
            if self._resumed is not None:
                record_damage(self._resumed, attempt.place.store, attempt.place.log.run, self._further)
            sweep(attempt.place.store, attempt.place.log.run)

    def on_durable(self, done: CommittedSave) -> None:
        """Tag a checkpoint that this process wrote, then remove those that the policy does not keep."""
        if done.made_here and self._attempt is not None:
            if done.tag is not None:
                tag_if_possible(self._attempt.place.log, done.tag, done.report.id)
            retire(self._attempt.place, self._keep, self._verified)
            self._attempt.distrust(self._verified)


def retire(place: CommitTarget, keep: Keep, verified: dict[str, bool]) -> None:
    """Retire the checkpoints that ``keep`` no longer keeps.

    Raise ``Fenced``; report other failures, which the next save retries.
    """
    if keep.is_everything:
        return
    verified_before = dict(verified)
    try:
        report = prune_a_share(place.store, place.log.run, keep, verified=verified, log=place.log, epoch=place.epoch)
        if report.retired:
            emit("prune.done", f"removed {len(report.retired)} checkpoints", retired=report.retired, left=report.left)
        damaged = [
            checkpoint_id
            for checkpoint_id, sound in verified.items()
            if not sound and verified_before.get(checkpoint_id) is not False
        ]
        wrong = dict.fromkeys(damaged, "its bytes are not what was committed")
        record_checked(place.store, place.log.run, wrong, "retention")
    except Fenced:
        raise
    except RelightError as error:
        emit("prune.failed", f"old checkpoints could not be removed this time: {error}", kind=error.kind)


def record_damage(resumed: Resumed, store: ByteStore, run: str, further: Sequence[Further]) -> None:
    """Record which checkpoints the restore before this attempt could not read, in the log of each tier that has a damaged copy."""
    record_checked(store, run, resumed.damaged, "a restore")
    for place, damaged in resumed.damaged_copies.items():
        _, tier, name = further[place - 1]
        record_checked(tier, name, damaged, "a restore")


def sweep(store: ByteStore, run: str) -> None:
    """Delete the files of unfinished saves of superseded attempts."""
    try:
        report = execute_sweep(plan_sweep(store, run), store)
        if report.deleted:
            emit("sweep.done", f"removed what {len(report.deleted)} unfinished saves had left", deleted=report.deleted)
    except RelightError as error:
        emit("prune.failed", f"leftovers could not be removed this time: {error}", kind=error.kind)
