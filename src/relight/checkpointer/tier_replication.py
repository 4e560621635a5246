"""A run's further tiers, as the trainer sees them: told to the log, taken charge of, drained to, waited for."""

from __future__ import annotations

import contextlib
import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from time import monotonic
from typing import Any

from relight.catalog.tiers import (
    Further,
    Reach,
    announce,
    attempt_name,
    check_same_run,
    drained_to,
    newest_seq,
    open_tier,
    read_tier,
    retired_among,
    tiers_of,
)
from relight.checkpointer.save_handle import Save
from relight.commit import Attempt
from relight.commit.attempt import take_over
from relight.drain import Drainer
from relight.errors import ConfigError, RelightError, StoreUnavailable
from relight.format.records import NoteBody
from relight.keys import StoreSecurity
from relight.log import History, Log, fold
from relight.observe import Event, emit, subscribe
from relight.policy import Tiers
from relight.policy.adaptive import is_routine
from relight.policy.keep import with_recorded
from relight.policy.tiers import NOW, PACE_TOPIC, groups_of, owed
from relight.reclaim.prune import candidates_of
from relight.store.retry import first_contact
from relight.store.urls import absolute
from relight.store.wrapper import guard_of

RETRY_S = 5.0
"""Seconds between two looks at what is left to copy while the run's end waits for it."""
REMEMBERED = 100
"""Saves whose handles hear of it when they are drained."""


def open_further(tiers: Tiers | None, guard: StoreSecurity) -> Sequence[Further]:
    """Name, store and run of each further tier; ``ConfigError`` for what is no store, before anything begins."""
    return [(tier.name, *open_tier(tier, guard)) for tier in (tiers.further if tiers is not None else ())]


def read_further(further: Sequence[Further], near: History) -> list[Reach]:
    """What each has. One that does not answer is told of; ``StoreUnavailable`` if it might hold the only checkpoints there are.

    ``ConfigError`` if a tier holds another run's checkpoints.
    """
    reaches = [read_tier(*one) for one in further]
    for reach in reaches:
        check_same_run(near, reach)
    for reach in reaches:
        if reach.error is not None:
            emit("tier.unreachable", f"tier {reach.name} does not answer: {reach.error}", tier=reach.name, kind=reach.error.kind)
    silent = [reach for reach in reaches if reach.error is not None]
    if silent and not near.live and not any(reach.history.live for reach in reaches):
        raise StoreUnavailable(
            f"the nearest tier has no checkpoint, and {', '.join(reach.name for reach in silent)} may have some, but does not answer",
            where=silent[0].store.url,
            hint="make it answer; or, for a run that shall begin from scratch, leave that tier out",
        ) from silent[0].error
    return reaches


def _lacking(history: History) -> dict[str, list[str]]:
    """What each further tier still lacks, as the nearest one's log knows it."""
    found: dict[str, list[str]] = {}
    there, candidates = drained_to(history), candidates_of(history)
    for tier in tiers_of(history):
        copied = there.get(tier.name, set())
        rules = with_recorded(tier.keep, history.best_by)
        if lacks := owed(rules, candidates, newest_seq(history, copied), had=retired_among(history, copied)):
            found[tier.name] = lacks
    return found


def _emit(name: str, say: str, fields: dict[str, Any]) -> None:
    emit(name, say, **fields)


class TierReplicator:
    """For one attempt, of the rank that leads. Without further tiers it does nothing."""

    def __init__(self, tiers: Tiers | None) -> None:
        given = tiers.tiers if tiers is not None else ()
        self._tiers = tuple(replace(one, url=absolute(one.url)) for one in given)  # whoever drains works elsewhere
        self._names = frozenset(one.name for one in self._tiers[1:])
        self._groups = groups_of(self._tiers)
        self._saves: deque[Save] = deque(maxlen=REMEMBERED)
        self._there: dict[str, set[str]] = {}
        self._failed: set[str] = set()
        self._changed = threading.Condition()
        self._drainer: Drainer | None = None
        self._attempt: Attempt | None = None
        self._hurries = self._fenced = False
        self.missing: dict[str, list[str]] = {}
        """What the run's end found missing: ids of checkpoints, by tier."""
        self._undo = subscribe(self._on_copied) if self._names else lambda: None

    def begin(self, attempt: Attempt) -> None:
        """Tell the log which tiers there are, if that is not what it says already, and take charge of each that answers."""
        self._attempt = attempt
        history = first_contact(attempt.history)
        before = tiers_of(history)
        if self._tiers[1:] != before:
            announce(attempt.place.log, self._tiers, attempt.epoch)
        name = attempt_name(history, attempt.epoch)
        for tier in self._tiers[1:]:
            try:
                store, run = open_tier(tier, guard_of(attempt.store))
                check_same_run(history, read_tier(tier.name, store, run))
                take_over(Log(store, run), name)
            except ConfigError:
                raise
            except RelightError as error:
                emit("tier.unreachable", f"tier {tier.name}: {error}; it is tried again behind each save", tier=tier.name, kind=error.kind)

    def expect(self, save: Save) -> Save:
        """A save that is to be drained once it is durable."""
        if self._names:
            save.has_remote_tiers = True
            save._asks_further = self._hurry
            self._saves.append(save)
        return save

    def made_here(self, attempt: Attempt) -> None:
        """A save became durable without the agent, which would else see to it: drain from here."""
        if not self._names:
            return
        if self._drainer is None:
            place = attempt.place
            self._drainer = Drainer(place.store.url, place.log.run, _emit, lambda: True, guard=guard_of(place.store))
        self._drainer.wake()

    def wait(self, timeout: float, *, again: bool = False) -> bool:
        """Until the newest durable save is on all further tiers, of copies on as many as are enough, or so many have failed meanwhile that
        it won't be. False if it is not. ``again``: failures do not end the wait, and the wait was reported before."""
        last = next((save for save in reversed(self._saves) if save.done and save.id), None)
        if last is None or last.drained:
            return True
        self._hurry()
        if not again:
            emit("drain.waiting", f"waiting until step {last.step} is on {', '.join(sorted(self._names))}", id=last.id, step=last.step)
        ends = monotonic() + timeout
        with self._changed:
            self._failed.clear()
            self._changed.wait_for(lambda: last.drained or (not again and self._is_hopeless(last)), max(0.0, ends - monotonic()))
        return last.drained

    def finish(self, timeout: float) -> None:
        """Wait for the copies of the newest save, until ``timeout`` is over: a tier that failed once may answer again. ``missing`` and an
        event then name what is not there. A tier that another attempt has taken over is not waited for."""
        if not self._names or self._attempt is None:
            return
        ends, done = monotonic() + timeout, self.wait(timeout)
        while not done and monotonic() < ends and str(None) not in self._failed and not self._fenced:
            done = self.wait(max(0.0, min(RETRY_S, ends - monotonic())), again=True)
        with contextlib.suppress(RelightError):
            self.missing = _lacking(self._attempt.history())
        if self.missing:
            names = "; ".join(f"{tier} lacks {', '.join(ids)}" for tier, ids in self.missing.items())
            emit("drain.unfinished", f"the run ends before its copies are made: {names}; relight drain copies them", missing=self.missing)

    def _hurry(self) -> None:
        """Whoever waits for a save on all tiers has asked for it there: from here on each goes to all of them, whatever its turn."""
        attempt, saves = self._attempt, list(self._saves)
        if attempt is None or self._hurries or not any(is_routine(save.reason) for save in saves):
            return
        self._hurries = True
        note = NoteBody(topic=PACE_TOPIC, data={NOW: True})
        with contextlib.suppress(RelightError):  # then it is waited for in vain, which is told
            log = Log(attempt.store, attempt.run)
            paced = any(isinstance(one.body, NoteBody) and one.body.topic == PACE_TOPIC for one in fold(log.read()).notes)
            log.append(lambda view: (note, attempt.epoch))
            if paced:
                self.made_here(attempt)

    def close(self) -> None:
        """No more of it. What is being copied by a drainer of our own is given up."""
        self._undo()
        if self._drainer is not None:
            self._drainer.stop()

    def _on_copied(self, event: Event) -> None:
        tier = event.fields.get("tier")
        if event.name in ("drain.done", "drain.found") and tier in self._names:
            checkpoint_id = str(event.fields.get("id"))
            with self._changed:
                there = self._there.setdefault(checkpoint_id, set())
                there.add(tier)
                if all(len(there.intersection(group.members)) >= group.quorum for group in self._groups):
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
        """Whether too many have failed since somebody began to wait."""
        there = self._there.get(save.id or "", set())
        left = self._names - (self._failed - there)
        return str(None) in self._failed or any(len(left.intersection(group.members)) < group.quorum for group in self._groups)

    def _mark_everywhere(self, checkpoint_id: str) -> None:
        """It is everywhere it has to be. Those before it that are not will never be: nothing is copied behind what is newer."""
        position = next((at for at, save in enumerate(self._saves) if save.id == checkpoint_id), -1)
        for at, save in enumerate(list(self._saves)[: position + 1]):
            if at == position:
                save._notify(drained=True)
            elif save.done and not save.drained:
                save._notify(superseded=True)
