"""Several stores of one run: which there are, what each has, and one order for all of it.

Each tier has a log of its own, and what is in it was copied in order. So the orders agree, and are merged without a clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from relight.catalog.checked import VerificationResult, damage
from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.format.records import Body, CommitBody, FenceBody, NoteBody
from relight.keys import StoreSecurity
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.log.related import are_unrelated
from relight.log.superseded import superseded
from relight.policy.keep import Candidate
from relight.policy.tiers import (
    COPYING_TOPIC,
    DRAINED_TOPIC,
    NOTE_TOPIC,
    NOW,
    PACE_TOPIC,
    Group,
    Tier,
    TierPace,
    decode_tiers,
    encode_tiers,
    groups_of,
)
from relight.store import ByteStore, open_bytes
from relight.store.urls import split_run
from relight.store.wrapper import guard_of

Further = tuple[str, ByteStore, str]
"""A further tier: its name, its store, and the run's name there."""


class Reach(NamedTuple):
    """A tier's run as it could be read: ``view`` is None if it has none yet, ``error`` says why it could not be."""

    name: str
    store: ByteStore
    run: str
    view: LogView | None = None
    error: RelightError | None = None

    @property
    def history(self) -> History:
        """What it has."""
        return fold(self.view) if self.view is not None else History()


class TierCopy(NamedTuple):
    """One of a checkpoint's copies: in which tier, what that tier's log says of it, and whether there is another further out."""

    place: int
    checkpoint: Checkpoint
    has_next: bool = False


class Merged(NamedTuple):
    """All tiers as one history, and where each of its checkpoints lies, nearest first."""

    history: History
    copies: dict[str, list[TierCopy]]
    damaged: Mapping[tuple[int, str], VerificationResult] = {}
    """Copies that are known to be damaged, by their tier's place and the checkpoint's id."""


def announce(log: Log, tiers: Sequence[Tier], epoch: int) -> None:
    """Have the nearest one's log say which tiers there are, nearest first: whoever reads it knows them then."""
    note = NoteBody(topic=NOTE_TOPIC, data={**encode_tiers(tiers)})

    def decide(view: LogView) -> tuple[Body, int]:
        if (history := fold(view)).epoch > epoch:
            raise superseded(history, epoch, log.run)
        return note, epoch

    log.append(decide)


def tiers_of(history: History) -> tuple[Tier, ...]:
    """The further tiers, as the newest NOTE of the nearest one's log tells them."""
    return _recorded_tiers(history)[1:]


def groups_in(history: History) -> list[Group]:
    """What the further tiers are to have, as the nearest one's log tells it."""
    return groups_of(_recorded_tiers(history))


def nearest_name(history: History) -> str:
    """What the nearest one is called there; a run without tiers is "here"."""
    return next((tier.name for tier in _recorded_tiers(history)), "here")


def drained_to(history: History) -> dict[str, set[str]]:
    """Of each further tier, by name: what the nearest one's log says it has got."""
    found: dict[str, set[str]] = {}
    for note in _notes(history, DRAINED_TOPIC):
        found.setdefault(str(note.data.get("tier")), set()).add(str(note.data.get("id")))
    return found


def copying_to(history: History) -> dict[str, str]:
    """Of each further tier, by name: the checkpoint whose copying began last, unless the copy is there."""
    found = {str(note.data.get("tier")): str(note.data.get("id")) for note in _notes(history, COPYING_TOPIC)}
    drained = drained_to(history) if found else {}
    return {tier: one for tier, one in found.items() if one not in drained.get(tier, ())}


def drained_bytes(history: History, tier: str) -> dict[str, int]:
    """What each checkpoint takes there by itself, by its id, as far as it was told: an older Relight did not say."""
    said = [(note.data.get("id"), note.data.get("bytes")) for note in _notes(history, DRAINED_TOPIC) if note.data.get("tier") == tier]
    return {str(one): size for one, size in said if isinstance(size, int) and size >= 0}


def pace_of(history: History, tier: str, ids: set[str]) -> TierPace:
    """How soon behind the newest of ``ids``, which it has, a tier gets the next: as the attempt in charge says. Another's word is over."""
    bodies = [one.body for one in history.notes if history.fences and one.epoch == history.fences[-1].epoch]
    told = [body.data for body in bodies if isinstance(body, NoteBody) and body.topic == PACE_TOPIC]
    least_s = told[-1].get(tier) if told and not any(NOW in one for one in told) else None
    if not isinstance(least_s, (int, float)) or not 0 < least_s < float("inf"):
        return TierPace()
    known = {**history.retired, **history.by_id}
    last = max((known[one] for one in ids if one in known), key=lambda one: one.seq, default=None)
    return TierPace(float(least_s), seconds_since_epoch(last.time) if last is not None else None)


def attempt_name(history: History, epoch: int) -> str:
    """What the attempt with that epoch called itself."""
    return next(fence.body.attempt for fence in history.fences if fence.epoch == epoch and isinstance(fence.body, FenceBody))


def newest_seq(history: History, ids: set[str]) -> int:
    """The number of the newest of ``ids`` in this log, live or retired; −1 if it knows none of them."""
    known = {**history.retired, **history.by_id}
    return max((known[one].seq for one in ids if one in known), default=-1)


def retired_among(history: History, ids: Collection[str]) -> list[Candidate]:
    """Return those of ``ids``, which a tier has or had, that are retired here, as ``owed`` needs them. Leaves out what was set aside."""
    found = (history.retired.get(one) for one in ids if one not in history.rolled_back_ids)
    return [Candidate(one.id, one.seq, one.step) for one in found if one is not None]


def open_tier(tier: Tier, guard: StoreSecurity) -> tuple[ByteStore, str]:
    """The store and the run's name; the store guarded as the nearest one is."""
    url, run = split_run(tier.url)
    return open_bytes(url, guard=guard), run


def check_same_run(near: History, reach: Reach) -> None:
    """``ConfigError`` if a further tier holds checkpoints of another run than ``near``: merged, one would be resumed as the other."""
    if reach.error is None and are_unrelated(near, far := reach.history):
        raise ConfigError(
            f"tier {reach.name} holds another run: its {len(far.live)} checkpoints up to step {far.live[-1].step}, and the "
            f"{len(near.live)} of the nearest tier up to step {near.live[-1].step}, share none",
            where=f"{reach.store.url.rstrip('/')}/{reach.run}",
            hint="give the tier a place of its own, or the run another name",
        )


def merge(histories: Sequence[History]) -> Merged:
    """One order for all of them, nearest tier first: what a further tier alone has comes right behind what came before it there, and
    before what a later attempt saved.
    """
    order: list[str] = []
    copies: dict[str, list[TierCopy]] = {}
    for place, history in enumerate(histories):
        at = 0
        for one in history.live:
            key = one.original_id
            if key in copies:
                at = order.index(key) + 1
            else:
                while at < len(order) and _is_earlier(*_nearest(copies[order[at]], histories), one, history):
                    at += 1
                order.insert(at, key)
                at += 1
            copies.setdefault(key, []).append(TierCopy(place, one))
    copies = {key: [one._replace(has_next=one is not found[-1]) for one in found] for key, found in copies.items()}
    merged = History()
    for seq, key in enumerate(order):
        nearest = copies[key][0].checkpoint
        merged.by_id[key] = replace(nearest, seq=seq, body=_named(nearest, key))
    for history in reversed(histories):
        for name, checkpoint_id in history.tags.items():
            found = history.by_id[checkpoint_id]
            merged.tags[name] = found.original_id
        merged.retired.update({one.original_id: one for one in history.retired.values()})
        merged.rolled_back_ids |= {one.original_id for one in history.live if one.id in history.rolled_back_ids}
        merged.skips += [one for one in history.skips if one not in merged.skips]
        merged.best_by = history.best_by or merged.best_by
    merged.retired = {key: one for key, one in merged.retired.items() if key not in merged.by_id}
    wrong = {
        (place, history.by_id[one].original_id): found for place, history in enumerate(histories) for one, found in damage(history).items()
    }
    return Merged(merged, copies, wrong)


def read_tier(name: str, store: ByteStore, run: str) -> Reach:
    """A tier's log as it is now; a tier that does not answer, or has no such run yet, says so."""
    try:
        return Reach(name, store, run, Log(store, run).read())
    except CheckpointNotFound:
        return Reach(name, store, run)
    except ConfigError:
        raise
    except RelightError as error:
        return Reach(name, store, run, None, error)


def _recorded_tiers(history: History) -> tuple[Tier, ...]:
    notes = _notes(history, NOTE_TOPIC)
    return decode_tiers(notes[-1].data) if notes else ()


def _notes(history: History, topic: str) -> list[NoteBody]:
    return [record.body for record in history.notes if isinstance(record.body, NoteBody) and record.body.topic == topic]


def reach_all(store: ByteStore, run: str) -> list[Reach]:
    """Every tier of the run, nearest first, as the nearest one's log tells which there are."""
    near = read_tier("", store, run)
    further = [_same_run(near.history, read_tier(tier.name, *open_tier(tier, guard_of(store)))) for tier in tiers_of(near.history)]
    return [near._replace(name=nearest_name(near.history)), *further]


def _same_run(near: History, reach: Reach) -> Reach:
    """``reach``, or the error that its checkpoints are another run's, so that they are merged into no listing, scrub or restore."""
    try:
        check_same_run(near, reach)
    except ConfigError as error:
        return reach._replace(view=None, error=error)
    return reach


def _named(one: Checkpoint, key: str) -> CommitBody:
    return one.body if one.id == key else msgspec.structs.replace(one.body, id=key)


def _nearest(copies: list[TierCopy], histories: Sequence[History]) -> tuple[Checkpoint, History]:
    return copies[0].checkpoint, histories[copies[0].place]


def _attempt(history: History, one: Checkpoint) -> str:
    """Which attempt was in charge when it was committed."""
    fences = [fence.body for fence in history.fences if fence.seq < one.seq]
    return fences[-1].attempt if fences and isinstance(fences[-1], FenceBody) else ""


def _is_earlier(one: Checkpoint, of: History, other: Checkpoint, far: History) -> bool:
    """Whether ``one``, of a nearer tier, came before ``other``, of which only the tier with ``far`` tells: by the order of their attempts
    there; of attempts that it does not know, by steps."""
    fences = far.attempts
    mine, others = _attempt(of, one), _attempt(far, other)
    if mine in fences and others in fences and mine != others:
        return fences.index(mine) < fences.index(others)
    return one.step < other.step
