"""A restore: a requested rollback, the audit record, and one checkpoint after another until one is restored."""

from __future__ import annotations

from time import perf_counter

from relight.audit import record_if_possible
from relight.audit.facts import ActionFacts
from relight.capture import plan_restore
from relight.catalog.tiers import TierCopy
from relight.errors import CorruptCheckpoint, UnsafeContent
from relight.format.class_names import recorded_classes
from relight.format.collector import collector_paused
from relight.format.root_keys import MICRO_STEP
from relight.heartbeat import heartbeat
from relight.log.known_damage import REMOVED_TRIES, was_removed
from relight.ranks.collective_errors import read_on_all_ranks
from relight.ranks.one_writer import OneWriter
from relight.ranks.rng_groups import gather_rng_positions
from relight.restore.elastic_state import remap_rank_state
from relight.restore.every_rank import ReadByEveryRank
from relight.restore.find import first_good
from relight.restore.from_rank_0 import ReadByRank0
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.restore.rollback import apply_requested_rollback
from relight.restore.transport import RestoreTransport
from relight.store.durable import StaleHandle


def restore_state(request: RestoreRequest) -> Resumed:
    """Restore what ``request`` names, after a rollback that a supervisor requested, and record it in the audit log. Collective."""
    heartbeat().phase("restoring")
    apply_requested_rollback(request.store, request.run, request.ranks, request.first_step)
    if request.ranks.world.rank:
        return restore_first_good(request)
    facts = ActionFacts(request.run, given={"which": request.which, "only": request.only})
    with record_if_possible("restore", f"{request.store.url}/{request.run}@{request.which}", facts) as notes:
        result = restore_first_good(request)
        notes.append(
            f"step {result.checkpoint.step}, {result.checkpoint.id}"
            if result.checkpoint is not None
            else "there was none yet"
        )
        return result


def restore_first_good(request: RestoreRequest) -> Resumed:
    """Restore the first checkpoint that verifies for every rank, from the nearest copy. Collective.

    If retention removes a checkpoint while a single process restores it, the log is read again. Several ranks try the next older one.
    """
    ranks = request.ranks
    transport: RestoreTransport = (
        ReadByRank0(request, ranks) if isinstance(ranks, OneWriter) else ReadByEveryRank(request)
    )
    failed: BaseException | None = None
    try:
        return _restore_first_good(request, transport)
    except BaseException as error:
        failed = error
        raise
    finally:
        transport.close(failed)


class _Removed(Exception):
    """Retention has removed the checkpoint that was being restored: the run has newer ones."""


def _restore_first_good(request: RestoreRequest, transport: RestoreTransport) -> Resumed:
    started = perf_counter()
    for left in reversed(range(1 if request.ranks.several else REMOVED_TRIES)):
        result = Resumed(searched=transport.reads)
        found = transport.find(result)

        def attempt(copy: TierCopy, last: bool = not left, result: Resumed = result) -> None:
            try:
                # The garbage collector stays paused until all objects made for the restore are freed.
                with read_on_all_ranks(request.ranks, f"restoring checkpoint {copy.checkpoint.id}"), collector_paused():
                    _restore(request, transport, copy, result)
            except (CorruptCheckpoint, UnsafeContent, StaleHandle) as error:
                if not last and not copy.place and was_removed(request.store, request.run, copy.checkpoint.id):
                    raise _Removed from error
                raise

        try:
            if first_good(request, found.copies, attempt, result, found.tiers, found.silent):
                result.seconds = perf_counter() - started
        except _Removed:
            continue
        break
    return result


def _restore(request: RestoreRequest, transport: RestoreTransport, copy: TierCopy, result: Resumed) -> None:
    ranks, components, checkpoint = request.ranks, request.components, copy.checkpoint
    rank, world = ranks.world.rank, ranks.world.size
    stored = transport.open(copy)
    alike = gather_rng_positions(ranks.world, components) if ranks.several and world != stored.saved else ()
    with read_on_all_ranks(ranks, f"planning to restore checkpoint {checkpoint.id}"):
        carried = remap_rank_state(
            stored.tree,
            components,
            rank=rank,
            world=world,
            saved=stored.saved,
            key=f"step {checkpoint.step}",
            own=stored.own,
            alike=alike,
        )
        plan = plan_restore(
            carried.components, stored.tensors, carried.root, only=request.only, strict=request.strict, rename=request.rename,
            where=stored.prefix, check=stored.check, elsewhere=ranks.several, classes=recorded_classes(stored.user),
        )  # fmt: skip
    if ranks.several:
        plan.refuse(ranks.unused_on_all(plan.unused))
    result.bytes_read, result.source = transport.read(plan.sinks)
    # calls the components' own code, which may raise
    with read_on_all_ranks(ranks, f"finishing checkpoint {checkpoint.id}"):
        plan.finish()
    if request.only is None:
        now = gather_rng_positions(ranks.world, components) if carried.alike else ()
        with read_on_all_ranks(ranks, f"seeding again after checkpoint {checkpoint.id}"):
            carried.finish(rank, now)
    result.checkpoint = checkpoint
    result.values = plan.values
    result.environment = stored.environment
    result.notes = [*stored.exact, *carried.notes, *plan.notes] if request.only is None else plan.notes
    result.micro_step = MICRO_STEP.read(stored.user)
