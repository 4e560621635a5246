"""The entry to a restore: a requested rollback, the audit record, and the way in which ranks read."""

from __future__ import annotations

from relight.audit import record_if_possible
from relight.audit.facts import ActionFacts
from relight.heartbeat import heartbeat
from relight.ranks.one_writer import OneWriter
from relight.restore.every_rank import restore_from_store
from relight.restore.from_rank_0 import restore_from_rank_0
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.restore.rollback import apply_requested_rollback


def restore_state(request: RestoreRequest) -> Resumed:
    """Restore what ``request`` names; each rank reads the store itself, or all receive the state from rank 0.
    Collective."""
    heartbeat().phase("restoring")
    apply_requested_rollback(request.store, request.run, request.ranks)
    if request.ranks.world.rank:
        return _restored(request)
    facts = ActionFacts(request.run, given={"which": request.which, "only": request.only})
    with record_if_possible("restore", f"{request.store.url}/{request.run}@{request.which}", facts) as notes:
        result = _restored(request)
        notes.append(f"step {result.checkpoint.step}, {result.checkpoint.id}" if result.checkpoint is not None else "there was none yet")
        return result


def _restored(request: RestoreRequest) -> Resumed:
    ranks = request.ranks
    return restore_from_rank_0(request, ranks) if isinstance(ranks, OneWriter) else restore_from_store(request)
