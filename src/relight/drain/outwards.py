"""Copying outwards, tier by tier, until each has what it is to hold."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from relight.catalog import Run
from relight.catalog.best_by import record_best_by
from relight.catalog.fresh_starts import carry_fresh_start
from relight.catalog.incident_sync import level_diaries
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
from relight.errors import CheckpointNotFound, CorruptCheckpoint, Fenced, LeaseHeld, RelightError, StoreUnavailable, UnsafeContent
from relight.format.records import Body, NoteBody
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.policy.keep import Candidate, with_recorded
from relight.policy.tiers import COPYING_TOPIC, DRAINED_TOPIC, Tier, TierPace, owed
from relight.reclaim import execute, plan_prune
from relight.reclaim.prune import candidates_of
from relight.store import ByteStore
from relight.store.wrapper import guard_of
from relight.transfer.copying import Claimed, copy_one

Tell = Callable[[str, str, dict[str, Any]], None]
"""Event, sentence, fields: as ``observe.emit`` takes them."""
LOOKS_S = 0.5
"""Between two looks at what another node copies."""
STILL_S = 3.0
STILL_BYTES_PER_S = 50e6
"""A copy of another node's at which nothing shows for so long, and as long as all of it takes at that speed, is taken for given up."""
FOUND_MAX = 16
"""Of the newest checkpoints: those that others have copied are told of."""


@dataclass(slots=True)
class Drained:
    """What was done: ``(tier, id, bytes, seconds)`` of each copy; what is still owed to which tier; the first error of each tier."""

    copied: list[tuple[str, str, int, float]] = field(default_factory=list)
    owed: dict[str, list[str]] = field(default_factory=dict)
    errors: dict[str, RelightError] = field(default_factory=dict)


def drain(
    store: ByteStore,
    run: str,
    *,
    tell: Tell = lambda name, say, fields: None,
    progress: Callable[[int], None] | None = None,
    stop: Callable[[], bool] = lambda: False,
    at_pace: bool = True,
) -> Drained:
    """Copy to every further tier of the run what it is to hold and lacks; a tier that fails does not keep the others waiting.

    For the attempt in charge of the nearest tier: when another has taken charge of it, or of a tier, nothing more is copied there.
    ``at_pace``: what the attempt's schedule saves is copied as often as it says; otherwise the newest is in any case.
    Retention of each tier runs behind its copies; the run's incidents and accounts are brought to it and, if only it has them, back.
    Memory: what copying takes. What cannot be read near is passed over, and told.
    """
    near, report = Run(store, run), Drained()
    for tier in tiers_of(near.history()):
        try:
            _Way(near, tier, tell, progress, stop, report, at_pace).go()
        except RelightError as error:
            report.errors[tier.name] = error
            fields = {"tier": tier.name, "kind": error.kind}
            tell("drain.fenced" if isinstance(error, Fenced) else "drain.failed", f"tier {tier.name}: {error}", fields)
    return report


class _Way:
    """To one tier."""

    def __init__(
        self, near: Run, tier: Tier, tell: Tell, progress: Callable[[int], None] | None, stop: Callable[[], bool], report: Drained,
        at_pace: bool,
    ) -> None:  # fmt: skip
        self._at_pace = at_pace
        self._near, self._tier, self._tell, self._progress, self._stop, self._report = near, tier, tell, progress, stop, report
        self._attempt = ""
        self._log = Log(near.store, near.name)
        self._unreadable: set[str] = set()
        self._mine: set[str] = set()
        self._given_up: set[str] = set()
        """What another node has begun to copy, and does not go on with."""

    def go(self) -> None:
        """Until nothing is owed, or there is no more to be done."""
        tier, report = self._tier, self._report
        history = self._near.history()
        attempts = history.attempts
        if not attempts or not history.live:
            return
        self._attempt = attempts[-1]
        store, run = open_tier(tier, guard_of(self._near.store))
        log = Log(store, run)
        with contextlib.suppress(CheckpointNotFound):
            there = Reach(tier.name, store, run, log.read())
            if not there.history.attempts:  # else charge is taken over only from this run's own
                check_same_run(history, there)
        charge = take_over(log, self._attempt, attempts[:-1])
        with contextlib.suppress(RelightError):  # what cannot be written this time is written before the next copy
            level_diaries(self._near.store, self._near.name, store, run, self._stop)
        with contextlib.suppress(StoreUnavailable):  # the next drain records it
            record_best_by(log, history.best_by, charge)
        while not self._stop():
            history = self._near.history()
            if history.attempts[-1] != self._attempt:
                return  # whoever is in charge now drains
            far = fold(log.read())
            self._note(history, far)
            wanted = [one for one in owed_to(tier, history, far, at_pace=self._at_pace) if one not in self._unreadable]
            report.owed[tier.name] = wanted
            if not wanted:
                self._emit_copied(history, far)
                break
            one = history.find(wanted[0])
            assert one is not None
            with contextlib.suppress(StoreUnavailable):  # the next copy records it
                carry_fresh_start(history, far, one, log, charge)
            self._copy(one, store, log, charge)
            self._retire(store, log, charge)

    def _copy(self, one: Checkpoint, store: ByteStore, log: Log, charge: int) -> None:
        started, told = time.monotonic(), 0
        limit = self._tier.bytes_per_second
        begun = NoteBody(topic=COPYING_TOPIC, data={"tier": self._tier.name, "id": one.id})
        self._log.append(partial(_noted, begun))  # else retention may remove it near before all of it is copied

        def progress(length: int) -> None:
            if self._progress is not None:
                self._progress(length)
            if self._stop():
                raise StoreUnavailable("draining was stopped; the next one goes on with it", where=self._tier.name)

        def sent(length: int) -> None:
            nonlocal told
            told += length
            if limit:
                time.sleep(max(0.0, told / limit - (time.monotonic() - started)))

        try:
            copy_one(self._near.open(one), store, log, progress, charge, gives_way=one.id not in self._given_up, sent=sent)
        except Claimed as error:
            self._watch(one, store, log, error.prefix)
            return
        except LeaseHeld:
            if one.id in _named(fold(log.read()), self._near.history()):  # another node's was quicker
                return
            raise
        except (CorruptCheckpoint, UnsafeContent) as error:  # of the near copy: another checkpoint may be whole
            self._unreadable.add(one.id)
            what = f"checkpoint {one.id} is not copied to {self._tier.name}: {error}"
            self._tell("drain.failed", what, {"tier": self._tier.name, "id": one.id, "kind": error.kind})
            return
        seconds = time.monotonic() - started
        near, far = self._near.history(), fold(log.read())
        size = next((copy.body.new_bytes for copy in far.live if copy.original_id == one.id), one.body.alone_bytes)
        self._mine.add(one.id)
        self._report.copied.append((self._tier.name, one.id, size, seconds))
        self._note(near, far)
        self._tell(
            "drain.done",
            f"step {one.step} ({one.id}, {size / 1e6:.1f} MB) is on {self._tier.name} too, in {seconds:.1f} s",
            {"tier": self._tier.name, "id": one.id, "step": one.step, "bytes": size, "seconds": round(seconds, 3)},
        )

    def _watch(self, one: Checkpoint, store: ByteStore, log: Log, prefix: str) -> None:
        """Another node copies it: until it is there, or nothing shows at it any more."""
        patience_s = STILL_S + one.body.alone_bytes / (self._tier.bytes_per_second or STILL_BYTES_PER_S)
        seen: set[str] = set()
        changed = time.monotonic()
        while one.id not in _named(fold(log.read()), self._near.history()):
            now = {entry.name for entry in store.list(prefix)}
            if now != seen:
                seen, changed = now, time.monotonic()
            if time.monotonic() - changed > patience_s:
                self._given_up.add(one.id)
                return
            time.sleep(LOOKS_S)
            if self._stop():
                raise StoreUnavailable("draining was stopped; the next one goes on with it", where=self._tier.name)

    def _emit_copied(self, history: History, far: History) -> None:
        """What others of this attempt have copied: whoever waits for it here hears of it."""
        there = set(_named(far, history))
        for one in history.live[-FOUND_MAX:]:
            if one.id in there and one.id not in self._mine and one.epoch == history.epoch:
                what = f"step {one.step} ({one.id}) is on {self._tier.name} too: another process has copied it"
                self._tell("drain.found", what, {"tier": self._tier.name, "id": one.id, "step": one.step})

    def _note(self, history: History, far: History) -> None:
        """Tell the nearest log what is there now, so that retention there knows without asking; also what a drain that died did not say."""
        known = drained_to(history).get(self._tier.name, set())
        for copy in far.live:
            one = copy.original_id
            if one in known or history.find(one) is None:
                continue
            note = NoteBody(topic=DRAINED_TOPIC, data={"tier": self._tier.name, "id": one, "bytes": copy.body.new_bytes})
            self._log.append(partial(_noted, note))

    def _retire(self, store: ByteStore, log: Log, charge: int) -> None:
        """What the tier's own rules no longer keep. What goes wrong is told; the next copy tries again."""
        if self._tier.keep.is_everything:
            return
        try:
            execute(plan_prune(store, log.run, self._tier.keep, log=log), store, epoch=charge, log=log)
        except Fenced:
            raise
        except RelightError as error:
            what = f"old checkpoints of tier {self._tier.name} could not be removed this time: {error}"
            self._tell("prune.failed", what, {"tier": self._tier.name, "kind": error.kind})


_LONG_AGO = 10**12
"""More than any record's number."""


def _noted(note: NoteBody, view: LogView) -> tuple[Body, int]:
    return note, fold(view).epoch


def owed_to(tier: Tier, near: History, far: History, *, at_pace: bool = True) -> list[str]:
    """What a tier lacks, by the ids that the nearest tier knows, oldest first; ``at_pace``: but for what it is too soon for."""
    there = set(_named({**far.retired, **far.by_id}, near))
    rules, pace = with_recorded(tier.keep, near.best_by), pace_of(near, tier.name, there) if at_pace else TierPace()
    had = [*retired_among(near, there), *_forgotten(near, far)]
    return owed(rules, candidates_of(near), newest_seq(near, there), pace, had)


def _forgotten(near: History, far: History) -> list[Candidate]:
    """What a further tier has and the nearest one's log has left out of its summary: older than all that the log still knows."""
    known = near.by_id.keys() | near.retired.keys()
    return [Candidate(one.original_id, one.seq - _LONG_AGO, one.step) for one in far.live if one.original_id not in known]


def residency(store: ByteStore, run: str) -> tuple[list[str], Merged, list[RelightError | None]]:
    """Where each checkpoint of a run lies: the tiers' names, nearest first, all of them as one history, and which could not be read."""
    reaches = reach_all(store, run)
    return [reach.name for reach in reaches], merge([reach.history for reach in reaches]), [reach.error for reach in reaches]


def _named(far: History | dict[str, Checkpoint], near: History) -> Sequence[str]:
    """Ids of a further tier's checkpoints, as the nearest one knows them."""
    found = far.by_id if isinstance(far, History) else far
    return [one.original_id for one in found.values()]
