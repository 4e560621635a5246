"""Copies checkpoints from the nearest tier to each further tier, until each has what it must hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from relight.catalog import Run
from relight.catalog.tiers import (
    Merged,
    Reach,
    check_same_run,
    drained_to,
    merge,
    newest_seq,
    open_tier,
    pace_of,
    reach_all,
    retired_among,
    tiers_of,
)
from relight.commit.attempt import take_over
from relight.drain.carried_marks import MARKED, carry_marks, marked_there
from relight.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    Fenced,
    RelightError,
    StoreUnavailable,
    UnsafeContent,
)
from relight.format.records import Body, NoteBody
from relight.format.topics import COPIED, COPYING, CopiedNote, CopyingNote
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.known_damage import was_removed
from relight.policy.keep import Candidate, with_recorded
from relight.policy.tiers import Tier, TierPace, owed
from relight.reclaim import execute, plan_prune
from relight.reclaim.prune import candidates_of
from relight.run_records.best_by import record_best_by
from relight.run_records.fresh_starts import carry_fresh_start
from relight.run_records.incident_sync import sync_incidents
from relight.run_records.results import carry_results
from relight.store import ByteStore
from relight.store.wrapper import guard_of
from relight.transfer.shared_copy import copy_together
from relight.units import duration_text, size_text

Notify = Callable[[str, str, dict[str, Any]], None]
"""Receives an event: its name, sentence and fields, as ``observe.emit`` takes them."""
REPORTED_MAX = 16
"""Newest checkpoints for which copies by other processes are reported."""


@dataclass(slots=True)
class Drained:
    """Result of a drain: ``(tier, id, bytes, seconds)`` of each copy; the ids that each tier still lacks; the first
    error of each tier."""

    copied: list[tuple[str, str, int, float]] = field(default_factory=list)
    owed: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, RelightError] = field(default_factory=dict)


def drain(
    store: ByteStore,
    run: str,
    *,
    notify: Notify = lambda name, message, fields: None,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    at_pace: bool = True,
    ranks: frozenset[int] = frozenset(),
) -> Drained:
    """Copy to every further tier of the run the checkpoints that it must hold and lacks, together with all processes
    that do the same (``copy_together``). A tier that fails does not delay the others.

    The copies are those of the nearest tier's present attempt: when another attempt has fenced the run or a tier,
    copying there ends. ``at_pace``: copy scheduled saves only as often as the schedule states; False: copy the newest
    in any case. ``ranks``: this node copies their parts first; none for a process outside the job. After the copies, each tier's
    retention runs, and before them incidents and accounts are synchronised in both directions: not on nodes without rank 0. Memory: that of
    copying. A checkpoint that cannot be read in the nearest tier is skipped and reported.
    """
    near, report = Run(store, run), Drained()
    for tier in tiers_of(near.history()):
        try:
            _TierDrain(near, tier, notify, progress, stop, report, at_pace, ranks).go()
        except RelightError as error:
            report.errors[tier.name] = error
            fields = {"tier": tier.name, "kind": error.kind}
            notify(
                "drain.fenced" if isinstance(error, Fenced) else "drain.failed", f"tier {tier.name}: {error}", fields
            )
    return report


class _TierDrain:
    """The drain to one tier."""

    def __init__(
        self, near: Run, tier: Tier, notify: Notify, progress: Callable[[int], None] | None, stop: Callable[[], bool], report: Drained,
        at_pace: bool, ranks: frozenset[int],
    ) -> None:  # fmt: skip
        self._at_pace, self._ranks, self._leads = at_pace, ranks, not ranks or 0 in ranks
        self._near, self._tier, self._notify, self._progress, self._stop, self._report = (
            near,
            tier,
            notify,
            progress,
            stop,
            report,
        )
        self._attempt = ""
        self._log = Log(near.store, near.name)
        self._unreadable: set[str] = set()
        self._mine: set[str] = set()

    def go(self) -> None:
        """Copy until the tier lacks nothing, the drain is stopped, or another attempt is in charge."""
        tier, report = self._tier, self._report
        history = self._near.history()
        attempts = history.attempts
        if not attempts or not history.live:
            return
        self._attempt = attempts[-1]
        store, run = open_tier(tier, guard_of(self._near.store))
        log = Log(store, run)
        with contextlib.suppress(CheckpointNotFound):
            reach = Reach(tier.name, store, run, log.read())
            if not reach.history.attempts:  # else take_over accepts only attempts of this run
                check_same_run(history, reach)
        charge = take_over(log, self._attempt, attempts[:-1])
        if self._leads:
            with contextlib.suppress(RelightError):  # the next drain tries again
                sync_incidents(self._near.store, self._near.name, store, run, self._stop)
            with contextlib.suppress(StoreUnavailable):  # the next drain records it
                record_best_by(log, history.best_by, charge)
        while not self._stop():
            view = self._near.view()
            history = fold(view)
            if history.attempts[-1] != self._attempt:
                return  # the attempt that is in charge now drains
            far = fold(log.read())
            if self._leads:
                self._note(history, far)
                with contextlib.suppress(StoreUnavailable):  # the next copy records it
                    carry_results(history, far, log, charge)
                    carry_marks(view, far, tier.name, self._log, log, charge)
            wanted = [id for id in owed_to(tier, history, far, at_pace=self._at_pace) if id not in self._unreadable]
            report.owed[tier.name] = wanted
            if not wanted:
                self._emit_copied(history, far)
                break
            checkpoint = history.find(wanted[0])
            assert checkpoint is not None
            if self._leads:
                with contextlib.suppress(StoreUnavailable):  # the next copy records it
                    carry_fresh_start(history, far, checkpoint, log, charge)
            far = self._copy(checkpoint, history, store, log, charge) or far
            if self._leads:
                self._retire(far, store, log, charge)

    def _copy(self, checkpoint: Checkpoint, near: History, store: ByteStore, log: Log, charge: int) -> History | None:
        """Copy a checkpoint with other nodes. Return the tier's history after it; None if this node copied nothing."""
        started, total = time.monotonic(), 0
        limit = self._tier.bytes_per_second

        def progress(length: int) -> None:
            if self._progress is not None:
                self._progress(length)
            self._check_stopped()

        def share(length: int, nodes: int) -> None:
            nonlocal total
            total += length * nodes
            if limit:
                time.sleep(max(0.0, total / limit - (time.monotonic() - started)))

        def hold() -> None:
            begun = COPYING.note(CopyingNote(tier=self._tier.name, id=checkpoint.id))
            self._log.append(partial(_noted, begun))  # else retention may delete it in the nearest tier during the copy

        def pause(seconds: float) -> None:
            time.sleep(seconds)
            self._check_stopped()

        try:
            done = copy_together(
                self._near.open(checkpoint), store, log, charge,
                own=self._ranks, share=share, progress=progress, hold=hold, pause=pause,
            )  # fmt: skip
        # the nearest tier's copy is damaged: other checkpoints may be undamaged
        except (CorruptCheckpoint, UnsafeContent) as error:
            self._unreadable.add(checkpoint.id)
            if was_removed(self._near.store, self._near.name, checkpoint.id):
                return None
            what = f"checkpoint {checkpoint.id} is not copied to {self._tier.name}: {error}"
            self._notify("drain.failed", what, {"tier": self._tier.name, "id": checkpoint.id, "kind": error.kind})
            return None
        if not done.parts and not done.committed:
            return None
        seconds = time.monotonic() - started
        far = fold(log.read())
        whole = next(
            (copy.new_bytes for copy in far.live if copy.original_id == checkpoint.id), checkpoint.body.alone_bytes
        )
        parts = done.of
        size = whole if done.parts == parts else done.bytes
        self._mine.add(checkpoint.id)
        self._report.copied.append((self._tier.name, checkpoint.id, size, seconds))
        if done.committed:
            self._note(near, far)
        here = "" if done.parts == parts else f"; {done.parts} of {parts} parts ({size_text(size)}) from here"
        self._notify(
            "drain.done",
            f"step {checkpoint.step} ({checkpoint.id}, {size_text(whole)}) is on {self._tier.name} too, in {duration_text(seconds)}{here}",
            {
                "tier": self._tier.name,
                "id": checkpoint.id,
                "step": checkpoint.step,
                "bytes": size,
                "seconds": round(seconds, 3),
            },
        )
        return far

    def _check_stopped(self) -> None:
        if self._stop():
            raise StoreUnavailable("the drain was stopped; the next drain resumes the copy", where=self._tier.name)

    def _emit_copied(self, history: History, far: History) -> None:
        """Report the checkpoints of this attempt that other processes have copied, for a caller that waits for them
        here."""
        present = set(_named(far, history))
        for checkpoint in history.live[-REPORTED_MAX:]:
            if checkpoint.id in present and checkpoint.id not in self._mine and checkpoint.epoch == history.epoch:
                what = f"step {checkpoint.step} ({checkpoint.id}) is on {self._tier.name} too: another process has copied it"
                self._notify(
                    "drain.found", what, {"tier": self._tier.name, "id": checkpoint.id, "step": checkpoint.step}
                )

    def _note(self, history: History, far: History) -> None:
        """Record in the nearest tier's log what this tier holds, so that retention there need not read this tier.

        Records also the copies of a drain that died before it recorded them.
        """
        known = drained_to(history).get(self._tier.name, set())
        for copy in far.live:
            id = copy.original_id
            if id in known or history.find(id) is None:
                continue
            note = COPIED.note(CopiedNote(tier=self._tier.name, id=id, bytes=copy.body.new_bytes))
            self._log.append(partial(_noted, note))

    def _retire(self, far: History, store: ByteStore, log: Log, charge: int) -> None:
        """Retire what the tier's own rules no longer keep, and no tag or hold of the nearest tier.

        ``far``: what the tier has. An error is reported; the next copy tries again.
        """
        if self._tier.keep.is_everything:
            return
        try:
            plan = plan_prune(store, log.run, self._tier.keep, log=log)
            if plan.going:  # the plan may have read a whole checkpoint: a user may have tagged one meanwhile
                view = self._near.view()
                carry_marks(view, far, self._tier.name, self._log, log, charge)
                plan = plan.sparing(marked_there(fold(view), far), MARKED)
            execute(plan, store, epoch=charge, log=log)
        except Fenced:
            raise
        except RelightError as error:
            what = f"old checkpoints of tier {self._tier.name} could not be removed this time: {error}"
            self._notify("prune.failed", what, {"tier": self._tier.name, "kind": error.kind})


_LONG_AGO = 10**12
"""More than any record's number."""


def _noted(note: NoteBody, view: LogView) -> tuple[Body, int]:
    return note, fold(view).epoch


def owed_to(tier: Tier, near: History, far: History, *, at_pace: bool = True) -> list[str]:
    """Return the ids, in the nearest tier, of the checkpoints that a tier lacks, oldest first.

    ``at_pace``: without those that the tier's pace skips.
    """
    present = set(_named({**far.retired, **far.by_id}, near))
    rules, pace = with_recorded(tier.keep, near.best_by), pace_of(near, tier.name, present) if at_pace else TierPace()
    had = [*retired_among(near, present), *_forgotten(near, far)]
    return owed(rules, candidates_of(near), newest_seq(near, present), pace, had)


def _forgotten(near: History, far: History) -> list[Candidate]:
    """Return a further tier's checkpoints that the nearest tier's log summary has left out: older than all that the log
    still has."""
    known = near.by_id.keys() | near.retired.keys()
    return [
        Candidate(copy.original_id, copy.seq - _LONG_AGO, copy.body.steps_done - 1)
        for copy in far.live
        if copy.original_id not in known
    ]


def residency(store: ByteStore, run: str) -> tuple[list[str], Merged, list[RelightError | None]]:
    """Return where a run's checkpoints are stored: the tiers' names, nearest first; their merged history; the error of
    each tier or None."""
    reaches = reach_all(store, run)
    return (
        [reach.name for reach in reaches],
        merge([reach.history for reach in reaches]),
        [reach.error for reach in reaches],
    )


def _named(far: History | dict[str, Checkpoint], near: History) -> Sequence[str]:
    """Return the ids of a further tier's checkpoints in the nearest tier."""
    checkpoints = far.by_id if isinstance(far, History) else far
    return [checkpoint.original_id for checkpoint in checkpoints.values()]
