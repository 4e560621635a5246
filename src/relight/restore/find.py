"""Find the copies of checkpoints that a restore tries, and try them in their order."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from relight.catalog import candidates
from relight.catalog.find import choose_all, nothing_counts, report
from relight.catalog.tiers import Merged, Reach, TierCopy, merge, read_further
from relight.decode import from_msgpack
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.format.names import is_run_name
from relight.format.records import CommitBody
from relight.log import Checkpoint, History, LogView, fold
from relight.log.truncated import whole_log
from relight.observe import emit
from relight.ranks.collective_errors import read_on_all_ranks
from relight.reader import Opened, open_checkpoint
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed
from relight.store import ByteStore
from relight.store.retry import first_contact


class Places(NamedTuple):
    """All tiers as this rank reads them. ``silent``: positions of tiers that did not answer."""

    tiers: Sequence[Reach]
    merged: Merged
    silent: set[int]

    def open(self, copy: TierCopy) -> Opened:
        """Open a copy, with the other copies as places to read the same bytes. Each pack is read from the nearest tier that has it."""
        place = self.tiers[copy.place]
        view = place.view
        if view is None:  # rank 0 has read the tier's log, and this rank could not
            why = (
                "has no such run on this host"
                if place.error is None
                else f"does not answer this rank: {place.error.what}"
            )
            hint = "mount the same directory here" if place.error is None else "repair this host's connection to it"
            raise StoreUnavailable(f"tier {place.name} {why}", where=place.store.url, hint=hint)
        copies = self.merged.copies.get(copy.checkpoint.original_id, ())

        def places(nearer: bool) -> tuple[tuple[ByteStore, str], ...]:
            return tuple(
                (self.tiers[other.place].store, other.checkpoint.directory_in(self.tiers[other.place].run))
                for other in copies
                if (other.place, other.checkpoint.id) != (copy.place, copy.checkpoint.id)
                and other.place not in self.silent
                and (other.place < copy.place) == nearer
            )

        opened = open_checkpoint(place.store, view.run, copy.checkpoint, store_id=view.store_id, run_id=view.run_id)
        return replace(opened, spares=places(False), nearer=places(True))

    def find(self, place: int, checkpoint_id: str) -> Checkpoint | None:
        """Return the checkpoint with that id in the tier at that position, or None if this rank has not read it there."""
        copies = (copy for copies in self.merged.copies.values() for copy in copies)
        return next(
            (copy.checkpoint for copy in copies if copy[0] == place and copy.checkpoint.id == checkpoint_id), None
        )

    def copies_of(self, checkpoints: Iterable[Checkpoint]) -> Iterator[TierCopy]:
        """Yield the copies of each checkpoint, the nearest first."""
        return (copy for checkpoint in checkpoints for copy in self.merged.copies[checkpoint.id])


def read_places(request: RestoreRequest, result: Resumed) -> Places:
    """Read the logs of all tiers, and report what is damaged. A run without a log has no checkpoint.

    Raise ``CheckpointNotFound`` if there is no log and a certain checkpoint is wanted, and ``CorruptCheckpoint`` if only
    damaged records are left.
    """
    view: LogView | None = None
    try:
        view = first_contact(lambda: whole_log(request.store, request.run))
    except CheckpointNotFound as error:
        if request.which != "latest" and not request.further:
            named = _of_another_run(error, request)
            raise named from None if named is error else error
    for fault in view.faults if view is not None else ():
        emit(
            "log.damaged",
            f"{fault.file}: {fault.reason}; this log record is ignored",
            file=fault.file,
            reason=fault.reason,
        )
    near = fold(view) if view is not None else History()
    result.newest_seen = near.live[-1].id if near.live else None
    result.skips, result.cuts = near.skips, near.lr_factors
    places = all_places(request, view, near)
    refuse_nothing(view, places.tiers[1:], request.which, request.where)
    report_suspect(places.merged.history, request.which)
    return places


def all_places(request: RestoreRequest, view: LogView | None, near: History) -> Places:
    """Return all tiers. ``view``: the nearest one's log, None if it has none; ``near``: its history. The logs of the others are read."""
    tiers = [Reach("store", request.store, request.run, view), *read_further(request.further, near)]
    if request.further:
        return Places(tiers, merge([tier.history for tier in tiers]), set())
    return Places(tiers, Merged(near, {checkpoint.id: [TierCopy(0, checkpoint)] for checkpoint in near.live}), set())


def _of_another_run(error: CheckpointNotFound, request: RestoreRequest) -> CheckpointNotFound:
    """Return ``error``, with the way to begin at another run's checkpoint if ``which`` names one."""
    which = str(request.which)
    if not is_run_name(which.rpartition("@")[0]):
        return error
    place = shlex.quote(f"{request.store.url.rstrip('/')}/{which}")
    hint = f"to begin this run there: relight branch {place} {shlex.quote(request.run)}, then restore() without a name"
    return CheckpointNotFound(error.what, where=error.where, hint=hint)


def refuse_nothing(view: LogView | None, further: Sequence[Reach], which: str | int, where: str) -> None:
    """Raise ``CorruptCheckpoint`` if ``latest`` is wanted and the run has only records that do not count: damaged ones,
    or records whose signer is not trusted here. Such a run must not be taken for a fresh one and started from
    scratch."""
    if (
        which != "latest"
        or view is None
        or not view.faults
        or fold(view).live
        or any(reach.history.live for reach in further)
    ):
        return
    raise nothing_counts(view, where)


def first_good(
    request: RestoreRequest,
    found: Iterable[TierCopy],
    attempt: Callable[[TierCopy], None],
    result: Resumed,
    tiers: Sequence[str],
    silent: set[int],
) -> bool:
    """Call ``attempt`` with one copy after another until one is restored. Report each copy that cannot be restored, and
    skip it if the latest checkpoint is wanted, or if another copy of the same checkpoint follows.

    ``tiers``: their names. ``silent`` gets the positions of tiers that do not answer. Return False if there is no copy
    to try. Raise ``CorruptCheckpoint`` if no copy can be restored.
    """
    failed: list[RelightError] = []
    result.run, result.where = request.run, request.store.url
    for copy in found:
        checkpoint = copy.checkpoint
        try:
            attempt(copy)
        except (CorruptCheckpoint, UnsafeContent, StoreUnavailable) as error:
            if isinstance(error, StoreUnavailable):
                silent.add(copy.place)
            if request.which != "latest" and not copy.has_next:
                raise
            failed.append(error)
            result.skipped.append((checkpoint.step, "unreadable" if isinstance(error, StoreUnavailable) else "damaged"))
            if not isinstance(error, StoreUnavailable):
                damaged = result.damaged_copies.setdefault(copy.place, {}) if copy.place else result.damaged
                damaged[checkpoint.id] = f"{error.where}: {error.what}" if error.where else error.what
            emit(
                "restore.skipped",
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is skipped: {error}",
                id=checkpoint.id,
                step=checkpoint.step,
                kind=error.kind,
            )
        else:
            if copy.place and result.source == "store":
                result.source = tiers[copy.place]
            return True
    if not failed:
        return False
    raise CorruptCheckpoint(
        f"none of the {len(failed)} checkpoints of run {request.run!r} can be restored",
        where=request.store.url,
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
                f"checkpoint {checkpoint.id} (step {checkpoint.step}) is skipped: "
                f"ranks differed in what they should have had in common when it was saved; restore({checkpoint.id!r}) takes it",
                id=checkpoint.id,
                step=checkpoint.step,
                kind="suspect",
            )


def agreed(request: RestoreRequest, places: Places) -> Iterator[TierCopy]:
    """Yield the copies that rank 0 would try, in its order, also those in tiers that this rank cannot read.

    Rank 0 sends its record of a copy only for further tiers: every rank has read the nearest one.
    """
    ranks, history = request.ranks, places.merged.history
    wanted = ranks.run_on_rank0(
        lambda: msgspec.msgpack.encode([_row(copy) for copy in places.copies_of(reported(history, request.which))]),
        "choosing a checkpoint",
    )
    with read_on_all_ranks(ranks, "counting the checkpoints"):
        rows = from_msgpack(wanted, list[_Row])
        if not rows and candidates(history, request.which):
            raise StoreUnavailable(
                "this rank sees checkpoints, and rank 0 sees none", hint="check that all ranks use the same store"
            )
    for place, has_next, checkpoint_id, record in rows:
        with read_on_all_ranks(ranks, f"finding checkpoint {checkpoint_id} in the log"):
            checkpoint = places.find(place, checkpoint_id)
            if checkpoint is None and record is not None:  # not read here, or removed since rank 0 read it
                checkpoint = Checkpoint(*record)
            if checkpoint is None:
                raise StoreUnavailable(f"checkpoint {checkpoint_id} is not in the log yet that this rank reads")
        yield TierCopy(place, checkpoint, has_next)


_Row = tuple[int, bool, str, tuple[int, str, int, CommitBody] | None]
"""A copy of rank 0: the tier's position, whether another copy of the same checkpoint follows, its id, and the fields of
its record."""


def _row(copy: TierCopy) -> _Row:
    record = copy.checkpoint
    fields = (record.seq, record.time, record.epoch, record.body) if copy.place else None
    return copy.place, copy.has_next, record.id, fields
