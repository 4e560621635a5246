"""Restore on every rank from what that rank reads itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from time import perf_counter

from relight.capture import only_needed, plan_restore, sinks_by_part
from relight.catalog import open_checkpoint
from relight.catalog.merged_parts import check_pieces, whole_of
from relight.catalog.one_writer import apart, saved_by, with_own
from relight.catalog.tiers import TierCopy
from relight.format import decode_tree
from relight.format.class_names import recorded_classes
from relight.format.collector import collector_paused
from relight.layout import Sink
from relight.log import Checkpoint
from relight.ranks.collective_errors import read_on_all_ranks
from relight.ranks.rng_groups import gather_rng_positions
from relight.restore.elastic_state import remap_rank_state
from relight.restore.find import CopySource, Places, agreed, first_good, read_places
from relight.restore.memory_sources import MemorySources
from relight.restore.reader import RestoreReader
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed


def restore_from_store(request: RestoreRequest) -> Resumed:
    """Restore on every rank from what that rank reads itself. All ranks restore the same checkpoint, which verifies for
    each of them. The nearest copy that verifies is used."""
    near = MemorySources(request.store, request.run, request.remote)
    try:
        return _restore_first(request, near)
    finally:
        near.close()


def _restore_first(request: RestoreRequest, near: MemorySources) -> Resumed:
    started, ranks = perf_counter(), request.ranks
    result = Resumed(searched=True)
    places = _read_in_order(request, result)

    def attempt(copy: TierCopy) -> None:
        source = places.source_of(copy)
        # The garbage collector stays paused until all objects made for the restore are freed.
        with read_on_all_ranks(ranks, f"restoring checkpoint {copy.checkpoint.id}"), collector_paused():
            _restore(request, source, copy.checkpoint, result, near)

    # with several ranks, rank 0's log decides whether the run exists
    copies = places.copies_of(agreed(request, places.merged.history))
    if first_good(request, copies, attempt, result, [tier.name for tier in places.tiers], places.silent):
        result.seconds = perf_counter() - started
    return result


def _read_in_order(request: RestoreRequest, result: Resumed) -> Places:
    """Read the logs on rank 0 first: other ranks then read at least the records that it read. Collective."""
    ranks, places = request.ranks, None
    for leads in (True, False) if ranks.several else (True,):
        with read_on_all_ranks(ranks, "reading the log"):
            if leads == (ranks.world.rank == 0):
                places = read_places(request, result)
    assert places is not None
    return places


def _restore(request: RestoreRequest, source: CopySource, checkpoint: Checkpoint, result: Resumed, near: MemorySources) -> None:
    ranks, components, view = request.ranks, request.components, source.view
    rank, world = ranks.world.rank, ranks.world.size
    # No rank may continue to the collective exchange while another rank aborts.
    with read_on_all_ranks(ranks, f"opening checkpoint {checkpoint.id}"):
        opened = open_checkpoint(source.store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
        opened = replace(opened, spares=source.spares)
    saved = saved_by(opened.root)
    alike = gather_rng_positions(ranks.world, components) if ranks.several and world != saved else ()
    with read_on_all_ranks(ranks, f"planning to restore checkpoint {checkpoint.id}"):
        part, check = opened.parts[0], near.check(opened)
        joined = whole_of(opened) if len(opened.parts) > 1 else None
        if joined is None:
            root, own = apart(opened.root, decode_tree(part.tree, len(part.tensors), opened.prefix), opened.prefix)
            root = with_own(root, own, rank)
        else:
            root, own = joined.tree_of(rank), joined.own
        key = f"step {checkpoint.step}"
        carried = remap_rank_state(root, components, rank=rank, world=world, saved=saved, key=key, own=own, alike=alike)
        plan = plan_restore(
            carried.components,
            part.tensors if joined is None else joined.tensors,
            carried.root,
            only=request.only,
            strict=request.strict,
            rename=request.rename,
            where=opened.prefix,
            check=partial(check, 0) if joined is None else partial(check_pieces, opened, joined, check=check),
            elsewhere=ranks.several,
            classes=recorded_classes(opened.root.user),
        )
        if joined is None:
            by_part: list[Mapping[int, Sink]] = [only_needed(plan.sinks)]
        else:
            by_part = [*sinks_by_part(plan.sinks, joined.tensors, joined.pieces, len(opened.parts))]
    if ranks.several:
        plan.refuse(ranks.unused_on_all(plan.unused))
    reading = RestoreReader(opened, by_part, near)
    with read_on_all_ranks(ranks, f"restoring checkpoint {checkpoint.id} from memory"):
        reading.from_memory()
    reading.from_store(ranks)
    result.bytes_read, result.source = reading.bytes_read, reading.source
    # calls the components' own code, which may raise
    with read_on_all_ranks(ranks, f"finishing checkpoint {checkpoint.id}"):
        plan.finish()
    if request.only is None:
        now = gather_rng_positions(ranks.world, components) if carried.alike else ()
        with read_on_all_ranks(ranks, f"seeding again after checkpoint {checkpoint.id}"):
            carried.finish(rank, now)
    result.checkpoint = checkpoint
    result.values = plan.values
    result.environment = opened.root.environment
    result.notes = [*opened.root.exact, *carried.notes, *plan.notes] if request.only is None else plan.notes
    micro = opened.root.user.get("relight.micro_step")
    result.micro_step = micro if isinstance(micro, int) else None
