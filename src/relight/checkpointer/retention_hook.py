"""Housekeeping of a run: retention, damage records, removal of leftovers."""

from __future__ import annotations

from collections.abc import Sequence

from relight.catalog.checked import record_checked
from relight.catalog.tiers import Further
from relight.commit import CommitTarget
from relight.errors import Fenced, RelightError
from relight.observe import emit
from relight.policy import Keep
from relight.reclaim import execute_sweep, plan_sweep, prune_a_share
from relight.restore.result import Resumed
from relight.store import ByteStore


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
            checkpoint_id for checkpoint_id, sound in verified.items() if not sound and verified_before.get(checkpoint_id) is not False
        ]
        wrong = dict.fromkeys(damaged, "its bytes are not what was committed")
        record_checked(place.store, place.log.run, wrong, "retention")
    except Fenced:
        raise
    except RelightError as error:
        emit("prune.failed", f"old checkpoints could not be removed this time: {error}", kind=error.kind)


def record_damage(found: Resumed, store: ByteStore, run: str, further: Sequence[Further]) -> None:
    """Record which checkpoints the restore before this attempt could not read, in the log of each tier that has a damaged copy."""
    record_checked(store, run, found.damaged, "a restore")
    for place, damaged in found.damaged_copies.items():
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
