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
from relight.errors import (
    CheckpointNotFound,
    CorruptCheckpoint,
    Fenced,
    LeaseHeld,
    RelightError,
    StoreUnavailable,
    UnsafeContent,
)
from relight.format.records import Body, NoteBody
from relight.format.topics import COPIED, COPYING, CopiedNote, CopyingNote
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.policy.keep import Candidate, with_recorded
from relight.policy.tiers import Tier, TierPace, owed
from relight.reclaim import execute, plan_prune
from relight.reclaim.prune import candidates_of
from relight.run_records.best_by import record_best_by
from relight.run_records.fresh_starts import carry_fresh_start
from relight.run_records.incident_sync import sync_incidents
from relight.store import ByteStore
from relight.store.wrapper import guard_of
from relight.transfer.copying import Claimed, copy_one
from relight.units import duration_text, size_text

Notify = Callable[[str, str, dict[str, Any]], None]
"""Receives an event: its name, sentence and fields, as ``observe.emit`` takes them."""
COPY_POLL_S = 0.5
"""Seconds between two polls of a copy that another node makes."""
ABANDONED_AFTER_S = 3.0
ABANDONED_BYTES_PER_S = 50e6
"""Another node's copy counts as abandoned if no new file appears for ``ABANDONED_AFTER_S``, plus the time of all its bytes at
this speed."""
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
) -> Drained:
    """Copy to every further tier of the run the checkpoints that it must hold and lacks. A tier that fails does not
    delay the others.

    The copies are those of the nearest tier's present attempt: when another attempt has fenced the run or a tier,
    copying there ends. ``at_pace``: copy scheduled saves only as often as the schedule states; False: copy the newest
    in any case. After the copies, each tier's retention runs. Incidents and accounts are synchronised in both
    directions. Memory: that of copying. A checkpoint that cannot be read in the nearest tier is skipped and reported.
    """
    near, report = Run(store, run), Drained()
    for tier in tiers_of(near.history()):
        try:
            _TierDrain(near, tier, notify, progress, stop, report, at_pace).go()
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
        at_pace: bool,
    ) -> None:  # fmt: skip
        self._at_pace = at_pace
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
        self._given_up: set[str] = set()
        """Ids of checkpoints that another node began to copy and abandoned."""

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
        with contextlib.suppress(RelightError):  # the next drain tries again
            sync_incidents(self._near.store, self._near.name, store, run, self._stop)
        with contextlib.suppress(StoreUnavailable):  # the next drain records it
            record_best_by(log, history.best_by, charge)
        while not self._stop():
            history = self._near.history()
            if history.attempts[-1] != self._attempt:
                return  # the attempt that is in charge now drains
            far = fold(log.read())
            self._note(history, far)
            wanted = [id for id in owed_to(tier, history, far, at_pace=self._at_pace) if id not in self._unreadable]
            report.owed[tier.name] = wanted
            if not wanted:
                self._emit_copied(history, far)
                break
            checkpoint = history.find(wanted[0])
            assert checkpoint is not None
            with contextlib.suppress(StoreUnavailable):  # the next copy records it
                carry_fresh_start(history, far, checkpoint, log, charge)
            self._copy(checkpoint, store, log, charge)
            self._retire(store, log, charge)

    def _copy(self, checkpoint: Checkpoint, store: ByteStore, log: Log, charge: int) -> None:
        started, total = time.monotonic(), 0
        limit = self._tier.bytes_per_second
        begun = COPYING.note(CopyingNote(tier=self._tier.name, id=checkpoint.id))
        self._log.append(partial(_noted, begun))  # else retention may delete it in the nearest tier during the copy

        def progress(length: int) -> None:
            if self._progress is not None:
                self._progress(length)
            if self._stop():
                raise StoreUnavailable("the drain was stopped; the next drain resumes the copy", where=self._tier.name)

        def sent(length: int) -> None:
            nonlocal total
            total += length
            if limit:
                time.sleep(max(0.0, total / limit - (time.monotonic() - started)))

        try:
            copy_one(
                self._near.open(checkpoint),
                store,
                log,
                progress,
                charge,
                gives_way=checkpoint.id not in self._given_up,
                sent=sent,
            )
        except Claimed as error:
            self._watch(checkpoint, store, log, error.prefix)
            return
        except LeaseHeld:
            if checkpoint.id in _named(fold(log.read()), self._near.history()):  # another node has copied it first
                return
            raise
        # the nearest tier's copy is damaged: other checkpoints may be undamaged
        except (CorruptCheckpoint, UnsafeContent) as error:
            self._unreadable.add(checkpoint.id)
            what = f"checkpoint {checkpoint.id} is not copied to {self._tier.name}: {error}"
            self._notify("drain.failed", what, {"tier": self._tier.name, "id": checkpoint.id, "kind": error.kind})
            return
        seconds = time.monotonic() - started
        near, far = self._near.history(), fold(log.read())
        size = next(
            (copy.body.new_bytes for copy in far.live if copy.original_id == checkpoint.id), checkpoint.body.alone_bytes
        )
        self._mine.add(checkpoint.id)
        self._report.copied.append((self._tier.name, checkpoint.id, size, seconds))
        self._note(near, far)
        self._notify(
            "drain.done",
            f"step {checkpoint.step} ({checkpoint.id}, {size_text(size)}) is on {self._tier.name} too, in {duration_text(seconds)}",
            {
                "tier": self._tier.name,
                "id": checkpoint.id,
                "step": checkpoint.step,
                "bytes": size,
                "seconds": round(seconds, 3),
            },
        )

    def _watch(self, checkpoint: Checkpoint, store: ByteStore, log: Log, prefix: str) -> None:
        """Wait while another node copies the checkpoint, until it is committed, or the copy counts as abandoned."""
        patience_s = ABANDONED_AFTER_S + checkpoint.body.alone_bytes / (
            self._tier.bytes_per_second or ABANDONED_BYTES_PER_S
        )
        seen: set[str] = set()
        changed = time.monotonic()
        while checkpoint.id not in _named(fold(log.read()), self._near.history()):
            now = {entry.name for entry in store.list(prefix)}
            if now != seen:
                seen, changed = now, time.monotonic()
            if time.monotonic() - changed > patience_s:
                self._given_up.add(checkpoint.id)
                return
            time.sleep(COPY_POLL_S)
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

    def _retire(self, store: ByteStore, log: Log, charge: int) -> None:
        """Retire what the tier's own rules no longer keep. An error is reported; the next copy tries again."""
        if self._tier.keep.is_everything:
            return
        try:
            execute(plan_prune(store, log.run, self._tier.keep, log=log), store, epoch=charge, log=log)
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
        Candidate(copy.original_id, copy.seq - _LONG_AGO, copy.step)
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
