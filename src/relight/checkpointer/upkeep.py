"""What a run does for its own order: retention, leftovers, tags."""

from __future__ import annotations

from collections.abc import Mapping

from relight.catalog.checked import record_checked
from relight.commit import Place
from relight.errors import Fenced, RelightError
from relight.observe import emit
from relight.policy import Keep
from relight.reclaim import execute_sweep, plan_sweep, prune_a_share
from relight.store import ByteStore


def retire(place: Place, keep: Keep, verified: dict[str, bool]) -> None:
    """Remove what ``keep`` no longer keeps. ``Fenced`` is the caller's; other failures are told, and tried again after the next save."""
    if keep.is_everything:
        return
    known = dict(verified)
    try:
        report = prune_a_share(place.store, place.log.run, keep, verified=verified, log=place.log, epoch=place.epoch)
        if report.retired:
            emit("prune.done", f"removed {len(report.retired)} checkpoints", retired=report.retired, left=report.left)
        found = [one for one, sound in verified.items() if not sound and known.get(one) is not False]
        wrong = dict.fromkeys(found, "its bytes are not what was committed")
        record_checked(place.store, place.log.run, wrong, "retention")
    except Fenced:
        raise
    except RelightError as error:
        emit("prune.failed", f"old checkpoints could not be removed this time: {error}", kind=error.kind)


def sweep(store: ByteStore, run: str, damaged: Mapping[str, str]) -> None:
    """Delete what saves of superseded attempts have left, and record what the restore before this attempt found ``damaged``."""
    record_checked(store, run, damaged, "a restore")
    try:
        report = execute_sweep(plan_sweep(store, run), store)
        if report.deleted:
            emit("sweep.done", f"removed what {len(report.deleted)} unfinished saves had left", deleted=report.deleted)
    except RelightError as error:
        emit("prune.failed", f"leftovers could not be removed this time: {error}", kind=error.kind)
