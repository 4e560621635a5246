"""A run's further tiers in the trainer: announces them in the log, takes them over, drains to them and waits for
copies."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from dataclasses import replace
from time import monotonic
from typing import Any

from relight.catalog.tiers import (
    announce,
    attempt_name,
    check_same_run,
    drained_to,
    groups_in,
    newest_seq,
    open_tier,
    read_tier,
    recorded_tiers,
    retired_among,
    tiers_of,
)
from relight.checkpointer.hooks import CommittedSave, Hook
from relight.checkpointer.save_handle import Save
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.drain import Drainer
from relight.errors import ConfigError, RelightError, with_outcome
from relight.format.topics import TIER_PACE
from relight.log import History, Log, fold
from relight.observe import Event, emit, subscribe
from relight.policy import Keep, Tiers
from relight.policy.keep import with_recorded
from relight.policy.tiers import NOW, groups_of, owed, short_of
from relight.reclaim.prune import candidates_of
from relight.store.retry import first_contact
from relight.store.urls import absolute
from relight.store.wrapper import guard_of
from relight.units import duration_text

RETRY_S = 5.0
"""Seconds between two checks of the missing copies while the run's end waits for them."""
REMEMBERED = 100
"""Number of saves with handles that are notified when they are drained."""


def _lacking(history: History) -> dict[str, list[str]]:
    """Return the ids of the checkpoints that each further tier must have and lacks, by the nearest tier's log.

    A checkpoint that enough tiers of a group have (its quorum) is missing on none of the group's tiers.
    """
    missing: dict[str, list[str]] = {}
    drained, candidates = drained_to(history), candidates_of(history)
    tiers = {tier.name: tier for tier in tiers_of(history)}
    for group in groups_in(history):
        lacks = {}
        for name in group.members:
            copied, rules = drained.get(name, set()), with_recorded(tiers[name].keep, history.best_by)
            lacks[name] = owed(rules, candidates, newest_seq(history, copied), had=retired_among(history, copied))
        short = short_of(group, lacks)
        for name, ids in lacks.items():
            if needed := [checkpoint_id for checkpoint_id in ids if checkpoint_id in short]:
                missing[name] = needed
    return missing


def _emit(name: str, message: str, fields: dict[str, Any]) -> None:
    emit(name, message, **fields)


class TierReplicator(Hook):
    """Replication to further tiers for one attempt, on rank 0. Without further tiers it does nothing."""

    def __init__(
        self, tiers: Tiers | None, leads: bool = True, *, keep: Keep | None = None, is_paced: bool = False
    ) -> None:
        """``leads``: whether this is rank 0; other ranks do nothing. ``keep``: the nearest tier's rules.

        ``is_paced``: ``relight.adaptive()`` computes the intervals of copies. Otherwise ``lag=`` states them.
        """
        self._leads, tiers = leads, tiers if leads else None
        given = tiers.tiers if tiers is not None else ()
        # the drainer may have another directory
        self._tiers = tuple(replace(tier, url=absolute(tier.url)) for tier in given)
        if keep is not None and given:  # recorded, so that relight prune --dry-run and the dashboard show it
            self._tiers = (replace(self._tiers[0], keep=keep), *self._tiers[1:])
        self._is_paced = is_paced
        self._names = frozenset(tier.name for tier in self._tiers[1:])
        self._groups = groups_of(self._tiers)
        self._saves: deque[Save] = deque(maxlen=REMEMBERED)
        self._there: dict[str, set[str]] = {}
        self._failed: set[str] = set()
        self._changed = threading.Condition()
        self._drainer: Drainer | None = None
        self._attempt: Attempt | None = None
        self._hurries = self._fenced = False
        self.missing: dict[str, list[str]] = {}
        """Ids of the checkpoints that were missing at the run's end, by tier."""
        self._undo = subscribe(self._on_copied) if self._names else lambda: None

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Announce the tiers in the log, if they differ from the last announcement, and take over each tier that
        answers."""
        if not self._leads:
            return
        self._attempt = attempt
        history = first_contact(attempt.history)
        if self._tiers != recorded_tiers(history):
            announce(attempt.place.log, self._tiers, attempt.epoch)
        self._record_lags(attempt)
        name = attempt_name(history, attempt.epoch)
        for tier in self._tiers[1:]:
            try:
                store, run = open_tier(tier, guard_of(attempt.store))
                check_same_run(history, read_tier(tier.name, store, run))
                take_over(Log(store, run), name)
            except ConfigError:
                raise
            except RelightError as error:
                emit(
                    "tier.unreachable",
                    f"tier {tier.name}: {with_outcome(error, 'it is tried again after each save')}",
                    tier=tier.name,
                    kind=error.kind,
                )

    def _record_lags(self, attempt: Attempt) -> None:
        """Record ``lag=`` as the least seconds between two copies of scheduled saves, unless the intervals are computed."""
        lags = {tier.name: tier.lag_s for tier in self._tiers[1:] if tier.lag_s}
        if not lags or self._is_paced:
            return
        whys = {name: f"one scheduled save in {duration_text(lag_s)}, because of lag=" for name, lag_s in lags.items()}
        attempt.note(TIER_PACE.note({**lags, **{f"{name}.why": why for name, why in whys.items()}}))
        for name, why in whys.items():
            emit("tiers.paced", f"tier {name}: {why}", tier=name, least_s=lags[name], reason=why)

    def on_request(self, save: Save) -> None:
        """Register a save that must be drained once it is durable."""
        if self._names:
            save.has_remote_tiers = True
            save._asks_further = self._hurry
            self._saves.append(save)

    def on_durable(self, done: CommittedSave) -> None:
        """Drain a checkpoint that this process wrote."""
        if done.made_here and self._attempt is not None:
            self._drain_here(self._attempt)

    def _drain_here(self, attempt: Attempt) -> None:
        """Drain from this process after a save that it made without the agent; for other saves the agent drains."""
        if not self._names:
            return
        if self._drainer is None:
            place = attempt.place
            self._drainer = Drainer(place.store.url, place.log.run, _emit, lambda: True, guard=guard_of(place.store))
        self._drainer.wake()

    def wait(self, timeout: float, *, again: bool = False) -> bool:
        """Wait until the newest durable save is on all further tiers (on the quorum of each group), or ``timeout``
        seconds have passed, or too many tiers have failed since. Return whether it is. ``again``: failures do not end
        the wait, and the wait was reported before."""
        last = next((save for save in reversed(self._saves) if save.done and save.id), None)
        if last is None or last.drained:
            return True
        self._hurry()
        if not again:
            emit(
                "drain.waiting",
                f"waiting until step {last.step} is on {', '.join(sorted(self._names))}",
                id=last.id,
                step=last.step,
            )
        ends = monotonic() + timeout
        with self._changed:
            self._failed.clear()
            self._changed.wait_for(
                lambda: last.drained or (not again and self._is_hopeless(last)), max(0.0, ends - monotonic())
            )
        return last.drained

    def finish(self, timeout: float) -> None:
        """Wait up to ``timeout`` seconds for the copies of the newest save: a tier that failed once may answer again.
        ``missing`` and an event then name the missing copies. Do not wait for a tier that another attempt has taken
        over."""
        if not self._names or self._attempt is None:
            return
        ends, done = monotonic() + timeout, self.wait(timeout)
        while not done and monotonic() < ends and str(None) not in self._failed and not self._fenced:
            done = self.wait(max(0.0, min(RETRY_S, ends - monotonic())), again=True)
        with contextlib.suppress(RelightError):
            self.missing = _lacking(self._attempt.history())
        if self.missing:
            names = "; ".join(f"{tier} lacks {', '.join(ids)}" for tier, ids in self.missing.items())
            emit(
                "drain.unfinished",
                f"the run ends before its copies are made: {names}; relight cp --tiers copies them",
                missing=self.missing,
            )

    def _hurry(self) -> None:
        """Make every later save go to all tiers at once: a caller waits for a save there."""
        attempt, saves = self._attempt, list(self._saves)
        has_pace = self._is_paced or any(tier.lag_s for tier in self._tiers[1:])
        if attempt is None or self._hurries or not has_pace or not any(save.why.is_routine for save in saves):
            return
        self._hurries = True
        note = TIER_PACE.note({NOW: True})
        with contextlib.suppress(RelightError):  # then the wait times out, which is reported
            log = Log(attempt.store, attempt.run)
            paced = any(True for _ in TIER_PACE.among(fold(log.read()).notes))
            log.append(lambda view: (note, attempt.epoch))
            if paced:
                self._drain_here(attempt)

    def on_close(self, polite: bool) -> None:
        """Unsubscribe from events. Abort the copies of this process's own drainer."""
        self._undo()
        if self._drainer is not None:
            self._drainer.stop()

    def _on_copied(self, event: Event) -> None:
        tier = event.fields.get("tier")
        if event.name in ("drain.done", "drain.found") and tier in self._names:
            checkpoint_id = str(event.fields.get("id"))
            with self._changed:
                tiers_done = self._there.setdefault(checkpoint_id, set())
                tiers_done.add(tier)
                if all(len(tiers_done.intersection(group.members)) >= group.quorum for group in self._groups):
                    self._mark_everywhere(checkpoint_id)
                while len(self._there) > REMEMBERED:
                    del self._there[next(iter(self._there))]
                self._changed.notify_all()
        elif event.name in ("drain.failed", "drain.fenced") and (tier in self._names or tier is None):
            with self._changed:
                self._failed.add(str(tier))
                self._fenced = self._fenced or event.name == "drain.fenced"
                self._changed.notify_all()

    def _is_hopeless(self, save: Save) -> bool:
        """Return whether too many tiers have failed since the wait began."""
        tiers_done = self._there.get(save.id or "", set())
        left = self._names - (self._failed - tiers_done)
        return str(None) in self._failed or any(
            len(left.intersection(group.members)) < group.quorum for group in self._groups
        )

    def _mark_everywhere(self, checkpoint_id: str) -> None:
        """Mark a save as drained, and earlier saves that are not as superseded: no older checkpoint is copied after a
        newer one."""
        position = next((index for index, save in enumerate(self._saves) if save.id == checkpoint_id), -1)
        for index, save in enumerate(list(self._saves)[: position + 1]):
            if index == position:
                save._notify(drained=True)
            elif save.done and not save.drained:
                save._notify(superseded=True)
