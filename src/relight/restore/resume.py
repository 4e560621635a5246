"""Restore the newest good checkpoint into live objects, and report the checkpoints that were skipped."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

import msgspec

from relight.capture import differences, only_needed, plan_restore, sinks_by_part
from relight.catalog import candidates, open_checkpoint
from relight.catalog.find import choose_all, nothing_counts, report
from relight.catalog.merged_parts import check_pieces, whole_of
from relight.catalog.one_writer import apart, saved_by, with_own
from relight.catalog.tiers import Further, Reach, TierCopy, merge, read_further
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.format import decode_tree
from relight.format.class_names import recorded_classes
from relight.format.collector import collector_paused
from relight.layout import Sink
from relight.log import Checkpoint, History, LogView, fold
from relight.log.truncated import RESTORED_ELSEWHERE, whole_log
from relight.observe import emit
from relight.peers import Remote
from relight.ranks.collective_errors import raise_on_all_ranks
from relight.ranks.group import SINGLE_RANK, RankGroup
from relight.ranks.rng_groups import gather_rng_positions
from relight.restore.elastic_state import remap_rank_state
from relight.restore.memory_sources import MemorySources
from relight.restore.reader import RestoreReader
from relight.store import ByteStore
from relight.store.retry import first_contact


@dataclass(slots=True)
class Resumed:
    """What a restore did. ``checkpoint`` is None if there was nothing to restore."""

    checkpoint: Checkpoint | None = None
    values: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    damaged: dict[str, str] = field(default_factory=dict)
    """Checkpoints of the nearest tier that could not be restored, by id, and what is wrong with each."""
    damaged_copies: dict[int, dict[str, str]] = field(default_factory=dict)
    """Damaged checkpoints of further tiers, by the tier's position: 1 is the first tier after the nearest."""
    run: str = ""
    where: str = ""
    """The store's URL."""
    skipped: list[tuple[int, str]] = field(default_factory=list)
    """Step of each checkpoint that could not be restored, and the reason in one word."""
    micro_step: int | None = None
    newest_seen: str | None = None
    skips: list[tuple[int, int]] = field(default_factory=list)
    cuts: dict[str, float] = field(default_factory=dict)
    searched: bool = False
    bytes_read: int = 0
    source: str = "store"
    seconds: float = 0.0

    @property
    def cut(self) -> float:
        """Factor for the learning rates: rollbacks after the restored checkpoint may have requested one."""
        return self.cuts.get(self.checkpoint.id if self.checkpoint is not None else "", 1.0)

    def notice_newer(self, history: History) -> None:
        """Warn if another process has committed a checkpoint to the run since this restore read the log."""
        newest = history.live[-1].id if history.live else None
        if newest is not None and self.searched and newest != self.newest_seen:
            emit(
                "preflight.warning",
                f"another process committed checkpoint {newest} to this run after this one restored; it is superseded now",
                id=newest,
            )


def resume(
    store: ByteStore,
    run: str,
    components: Mapping[str, object],
    which: str | int,
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    ranks: RankGroup = SINGLE_RANK,
    further: Sequence[Further] = (),
    remote: Callable[[], Remote | None] = lambda: None,
) -> Resumed:
    """Restore ``which`` into ``components``. ``latest`` tries checkpoints from newest to oldest until one verifies; any
    other value names one checkpoint, which is restored or an error is raised.

    The nearest copy of a checkpoint that verifies is used; ``further`` are the tiers after the store. All ranks restore
    the same checkpoint, which verifies for each of them. ``remote``: snapshots in the memory of other nodes.
    """
    near = MemorySources(store, run, remote)
    try:
        return _walk(store, run, components, which, near, further, only=only, strict=strict, rename=rename, ranks=ranks)
    finally:
        near.close()


def _walk(
    store: ByteStore,
    run: str,
    components: Mapping[str, object],
    which: str | int,
    near: MemorySources,
    further: Sequence[Further],
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    ranks: RankGroup,
) -> Resumed:
    started = perf_counter()
    result = Resumed(searched=True)
    view: LogView | None = None
    reaches: list[Reach] = []
    for leads in (True, False) if ranks.several else (True,):
        with raise_on_all_ranks(ranks, "reading the log"):
            # rank 0 first: other ranks then read at least the records that it read
            if leads == (ranks.world.rank == 0):
                with suppress(*([CheckpointNotFound] if which == "latest" or further else [])):
                    view = first_contact(lambda: whole_log(store, run))
                reaches = read_further(further, fold(view) if view is not None else History())
                refuse_nothing(view, reaches, which, f"{store.url.rstrip('/')}/{run}")
    for fault in view.faults if view is not None else ():
        emit("log.damaged", f"{fault.file}: {fault.reason}; the record counts for nothing", file=fault.file, reason=fault.reason)
    # with several ranks, rank 0's log decides whether the run exists
    history = fold(view) if view is not None else History()
    result.newest_seen, result.skips = history.live[-1].id if history.live else None, history.skips
    result.cuts = history.lr_factors
    places = [Reach("store", store, run, view), *reaches]
    merged = merge([place.history for place in places]) if further else None
    history = merged.history if merged is not None else history
    report_suspect(history, which)

    silent: set[int] = set()

    def attempt(copy: TierCopy) -> None:
        place = places[copy.place]
        assert place.view is not None  # a rank that has not read the log has no copy to try
        copies_of_it = merged.copies[copy.checkpoint.original_id] if merged is not None else ()
        others = [other for other in copies_of_it if other.place not in silent and other != copy]
        locations = [(places[other.place].store, other.checkpoint.lies_in(places[other.place].run)) for other in others]
        try:
            # The garbage collector stays paused until all objects made for the restore are freed.
            with raise_on_all_ranks(ranks, f"restoring checkpoint {copy.checkpoint.id}"), collector_paused():
                _restore(
                    place.store, place.view, copy.checkpoint, components, result, near, locations,
                    only=only, strict=strict, rename=rename, ranks=ranks,
                )  # fmt: skip
        except StoreUnavailable:
            silent.add(copy.place)
            raise
        if copy.place and result.source == "store":
            result.source = place.name

    chosen = _agreed(ranks, history, which)
    copies = (copy for checkpoint in chosen for copy in ([TierCopy(0, checkpoint)] if merged is None else merged.copies[checkpoint.id]))
    if first_good(copies, attempt, which, result, run=run, where=store.url):
        result.seconds = perf_counter() - started
    return result


def begun_history(attempt: Attempt, parent: str | None, rank: int) -> History:
    """Return the run's history at the start of ``attempt``. If the log never had ``parent``, rank 0 writes a note that
    names it.

    Without that note, a first save that was killed before its COMMIT would look like proof of a lost record.
    """
    history = first_contact(attempt.history)
    if rank == 0 and parent is not None and parent not in history.by_id and parent not in history.retired:
        attempt.note(RESTORED_ELSEWHERE, {"checkpoint": parent})
    return history


def refuse_nothing(view: LogView | None, further: Sequence[Reach], which: str | int, where: str) -> None:
    """Raise ``CorruptCheckpoint`` if ``latest`` is wanted and the run has only records that do not count: damaged ones,
    or records whose signer is not trusted here. Such a run must not be taken for a fresh one and started from
    scratch."""
    if which != "latest" or view is None or not view.faults or fold(view).live or any(reach.history.live for reach in further):
        return
    raise nothing_counts(view, where)


def first_good(
    found: Iterable[TierCopy], attempt: Callable[[TierCopy], None], which: str | int, result: Resumed, *, run: str, where: str
) -> bool:
    """Call ``attempt`` with one copy after another until one is restored. Report each copy that cannot be restored, and
    skip it if the latest checkpoint is wanted, or if another copy of the same checkpoint follows.

    Return False if there is no copy to try. Raise ``CorruptCheckpoint`` if no copy can be restored.
    """
    failed: list[RelightError] = []
    result.run, result.where = run, where
    for copy in found:
        checkpoint = copy.checkpoint
        try:
            attempt(copy)
        except (CorruptCheckpoint, UnsafeContent, StoreUnavailable) as error:
            if which != "latest" and not copy.has_next:
                raise
            failed.append(error)
            result.skipped.append((checkpoint.step, "unreadable" if isinstance(error, StoreUnavailable) else "damaged"))
            if not isinstance(error, StoreUnavailable):
                damaged = result.damaged_copies.setdefault(copy.place, {}) if copy.place else result.damaged
                damaged[checkpoint.id] = f"{error.where}: {error.what}" if error.where else error.what
            emit(
                "restore.skipped",
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is passed over: {error}",
                id=checkpoint.id,
                step=checkpoint.step,
                kind=error.kind,
            )
        else:
            return True
    if not failed:
        return False
    raise CorruptCheckpoint(
        f"none of the {len(failed)} checkpoints of run {run!r} can be restored",
        where=where,
        details=[str(error).splitlines()[0] for error in failed],
        hint="the live state may hold a mixture: do not train on it; relight verify shows all damage",
    )


def reported(history: History, which: str | int) -> list[Checkpoint]:
    """Return the checkpoints to try, in order. Emit the metric by which a checkpoint was chosen."""
    return [report(checkpoint) for checkpoint in choose_all(history, which)]


def report_suspect(history: History, which: str | int) -> None:
    """Report suspect checkpoints that are newer than the first one to try, and are skipped."""
    first = next(iter(candidates(history, which)), None) if which == "latest" else None
    for checkpoint in history.live:
        if first is not None and checkpoint.body.suspect and checkpoint.seq > first.seq:
            emit(
                "restore.skipped",
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is passed over: "
                f"ranks differed in what they should have had in common when it was saved; restore({checkpoint.id!r}) takes it",
                id=checkpoint.id,
                step=checkpoint.step,
                kind="suspect",
            )


def _agreed(ranks: RankGroup, history: History, which: str | int) -> Iterator[Checkpoint]:
    """Yield the checkpoints that rank 0 would try, in its order."""
    wanted = ranks.run_on_rank0(
        lambda: msgspec.json.encode([checkpoint.id for checkpoint in reported(history, which)]), "choosing a checkpoint"
    )
    ids = msgspec.json.decode(wanted)
    if not ids:
        with raise_on_all_ranks(ranks, "choosing a checkpoint"):
            if candidates(history, which):
                raise StoreUnavailable("this rank sees checkpoints, and rank 0 sees none", hint="check that all ranks use the same store")
    for checkpoint_id in ids:
        checkpoint = history.find(checkpoint_id)
        with raise_on_all_ranks(ranks, "choosing a checkpoint"):
            if checkpoint is None:
                raise StoreUnavailable(f"checkpoint {checkpoint_id} is not in the log yet that this rank reads")
        assert checkpoint is not None
        yield checkpoint


def _restore(
    store: ByteStore,
    view: LogView,
    checkpoint: Checkpoint,
    components: Mapping[str, object],
    result: Resumed,
    near: MemorySources,
    spares: Sequence[tuple[ByteStore, str]],
    *,
    only: Sequence[str] | None,
    strict: bool,
    rename: Mapping[str, str] | Callable[[str], str] | None,
    ranks: RankGroup,
) -> None:
    rank, world = ranks.world.rank, ranks.world.size
    # No rank may continue to the collective exchange while another rank aborts.
    with raise_on_all_ranks(ranks, f"opening checkpoint {checkpoint.id}"):
        opened = open_checkpoint(store, view.run, checkpoint, store_id=view.store_id, run_id=view.run_id)
        opened = replace(opened, spares=tuple(spares))
    saved = saved_by(opened.root)
    alike = gather_rng_positions(ranks.world, components) if ranks.several and world != saved else ()
    with raise_on_all_ranks(ranks, f"planning to restore checkpoint {checkpoint.id}"):
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
            only=only,
            strict=strict,
            rename=rename,
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
    with raise_on_all_ranks(ranks, f"restoring checkpoint {checkpoint.id} from memory"):
        reading.from_memory()
    reading.from_store(ranks)
    result.bytes_read, result.source = reading.bytes_read, reading.source
    # calls the components' own code, which may raise
    with raise_on_all_ranks(ranks, f"finishing checkpoint {checkpoint.id}"):
        plan.finish()
    if only is None:
        now = gather_rng_positions(ranks.world, components) if carried.alike else ()
        with raise_on_all_ranks(ranks, f"seeding again after checkpoint {checkpoint.id}"):
            carried.finish(rank, now)
    result.checkpoint = checkpoint
    result.values = plan.values
    result.environment = opened.root.environment
    result.notes = [*opened.root.exact, *carried.notes, *plan.notes] if only is None else plan.notes
    micro = opened.root.user.get("relight.micro_step")
    result.micro_step = micro if isinstance(micro, int) else None


def _skipped(result: Resumed) -> str:
    """Return the end of a restore's message: the steps of newer checkpoints, and why each was skipped."""
    return "".join(f"; skipped step {step}: {why}" for step, why in dict.fromkeys(result.skipped))


def report_restored(found: Resumed, start: int, environment: dict[str, Any]) -> None:
    """Emit what was restored, from where, and why training may not continue bit-exactly."""
    assert found.checkpoint is not None
    emit(
        "restore.done",
        f"resumed run {found.run!r} from step {found.checkpoint.step} (store {found.where}, {found.seconds:.2f} s"
        f"{'' if found.source == 'store' else f', from {found.source}'}); continuing with step {start}{_skipped(found)}",
        step=found.checkpoint.step,
        id=found.checkpoint.id,
        bytes=found.bytes_read,
        seconds=round(found.seconds, 6),
        source=found.source,
        run=found.run,
        store=found.where,
        skipped=[step for step, _ in found.skipped],
    )
    different = differences(found.environment, environment)
    if different:
        emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(different), differences=different)
    if found.notes:
        emit("environment.differs", "this resume may not be bit-exact: " + "; ".join(found.notes), differences=found.notes)
