"""Tiers of a run: the list of its stores, what each holds, and one merged history.

Each tier has its own log, and checkpoints are copied to it in order. So the orders agree, and merging needs no clock.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import msgspec

from relight.errors import CheckpointNotFound, ConfigError, RelightError, StoreUnavailable
from relight.format.records import Body, CommitBody, FenceBody
from relight.format.topics import COPIED, COPYING, TIER_PACE, TIERS
from relight.keys import StoreSecurity
from relight.log import Checkpoint, History, Log, LogView, fold
from relight.log.identity import seconds_since_epoch
from relight.log.related import are_unrelated
from relight.log.superseded import superseded
from relight.observe import emit
from relight.policy.keep import Candidate
from relight.policy.tiers import (
    NOW,
    Group,
    Tier,
    TierPace,
    Tiers,
    decode_tiers,
    encode_tiers,
    groups_of,
)
from relight.run_records.verification import VerificationResult, damage
from relight.store import ByteStore, open_bytes
from relight.store.urls import split_run
from relight.store.wrapper import guard_of

Further = tuple[str, ByteStore, str]
"""A further tier: its name, its store, and the run's name there."""


class Reach(NamedTuple):
    """Result of reading a tier's run. ``view`` is None if the tier does not have the run yet; ``error`` if reading failed."""

    name: str
    store: ByteStore
    run: str
    view: LogView | None = None
    error: RelightError | None = None

    @property
    def history(self) -> History:
        """The tier's history; empty if it was not read."""
        return fold(self.view) if self.view is not None else History()


class TierCopy(NamedTuple):
    """One copy of a checkpoint: index of the tier, the checkpoint in that tier's log, and whether a further tier has a copy."""

    place: int
    checkpoint: Checkpoint
    has_next: bool = False


class Merged(NamedTuple):
    """All tiers as one history, and the copies of each checkpoint, nearest first."""

    history: History
    copies: dict[str, list[TierCopy]]
    damaged: Mapping[tuple[int, str], VerificationResult] = {}
    """Copies known to be damaged, by the tier's index and the checkpoint's original id."""


def announce(log: Log, tiers: Sequence[Tier], epoch: int) -> None:
    """Record the tiers, nearest first, in the nearest tier's log, so that every reader of the log knows them."""
    note = TIERS.note({**encode_tiers(tiers)})

    def decide(view: LogView) -> tuple[Body, int]:
        if (history := fold(view)).epoch > epoch:
            raise superseded(history, epoch, log.run)
        return note, epoch

    log.append(decide)


def tiers_of(history: History) -> tuple[Tier, ...]:
    """Return the further tiers, from the newest NOTE in the nearest tier's log."""
    return recorded_tiers(history)[1:]


def groups_in(history: History) -> list[Group]:
    """Return the groups of further tiers, with what each must have, from the nearest tier's log."""
    return groups_of(recorded_tiers(history))


def nearest_name(history: History) -> str:
    """Return the nearest tier's name in its log; "here" for a run without tiers."""
    return next((tier.name for tier in recorded_tiers(history)), "here")


def drained_to(history: History) -> dict[str, set[str]]:
    """Return the ids that each further tier, by name, has received according to the nearest tier's log."""
    drained: dict[str, set[str]] = {}
    for _, note in COPIED.among(history.notes):
        drained.setdefault(note.tier, set()).add(note.id)
    return drained


def copying_to(history: History) -> dict[str, str]:
    """Return for each further tier, by name, the checkpoint with the copy that began last and has not arrived."""
    copying = {note.tier: note.id for _, note in COPYING.among(history.notes)}
    drained = drained_to(history) if copying else {}
    return {
        tier: checkpoint_id for tier, checkpoint_id in copying.items() if checkpoint_id not in drained.get(tier, ())
    }


def drained_bytes(history: History, tier: str) -> dict[str, int]:
    """Return the bytes that each checkpoint, by id, takes in the tier, where recorded: older versions did not record them."""
    notes = [note for _, note in COPIED.among(history.notes) if note.tier == tier]
    return {note.id: note.bytes for note in notes if note.bytes is not None and note.bytes >= 0}


def pace_of(history: History, tier: str, ids: set[str]) -> TierPace:
    """Return how soon after the newest of ``ids``, its checkpoints, a tier gets the next one.

    Only the NOTE of the present attempt counts; those of earlier attempts are outdated.
    """
    present = history.fences[-1].epoch if history.fences else None
    paces = [pace for record, pace in TIER_PACE.among(history.notes) if record.epoch == present]
    least_s = paces[-1].get(tier) if paces and not any(NOW in pace for pace in paces) else None
    if not isinstance(least_s, (int, float)) or not 0 < least_s < float("inf"):
        return TierPace()
    checkpoints = {**history.retired, **history.by_id}
    last = max(
        (checkpoints[checkpoint_id] for checkpoint_id in ids if checkpoint_id in checkpoints),
        key=lambda checkpoint_id: checkpoint_id.seq,
        default=None,
    )
    return TierPace(float(least_s), seconds_since_epoch(last.time) if last is not None else None)


def attempt_name(history: History, epoch: int) -> str:
    """Return the name of the attempt with that epoch."""
    return next(
        fence.body.attempt for fence in history.fences if fence.epoch == epoch and isinstance(fence.body, FenceBody)
    )


def newest_seq(history: History, ids: set[str]) -> int:
    """Return the record number of the newest of ``ids`` in this log, live or retired; −1 if it has none of them."""
    checkpoints = {**history.retired, **history.by_id}
    return max((checkpoints[checkpoint_id].seq for checkpoint_id in ids if checkpoint_id in checkpoints), default=-1)


def retired_among(history: History, ids: Collection[str]) -> list[Candidate]:
    """Return those of ``ids``, which a tier has or had, that are retired here, as candidates for ``owed``. Skips rolled back ones."""
    retired = (
        history.retired.get(checkpoint_id) for checkpoint_id in ids if checkpoint_id not in history.rolled_back_ids
    )
    return [
        Candidate(checkpoint.id, checkpoint.seq, checkpoint.body.steps_done - 1)
        for checkpoint in retired
        if checkpoint is not None
    ]


def open_tier(tier: Tier, guard: StoreSecurity) -> tuple[ByteStore, str]:
    """Open a tier with the nearest tier's security settings. Return its store and the run's name there."""
    url, run = split_run(tier.url)
    return open_bytes(url, guard=guard), run


def check_same_run(near: History, reach: Reach) -> None:
    """Raise ``ConfigError`` if a further tier holds another run than ``near``: merged, one would be resumed as the other."""
    if reach.error is None and are_unrelated(near, far := reach.history):
        raise ConfigError(
            f"tier {reach.name} holds another run: its {len(far.live)} checkpoints up to step {far.live[-1].step}, and the "
            f"{len(near.live)} of the nearest tier up to step {near.live[-1].step}, share none",
            where=f"{reach.store.url.rstrip('/')}/{reach.run}",
            hint="give the tier a place of its own, or the run another name",
        )


def merge(histories: Sequence[History]) -> Merged:
    """Merge the histories, nearest tier first, into one order.

    A checkpoint that only a further tier has comes right after its predecessor there, and before the saves of later attempts.
    """
    order: list[str] = []
    copies: dict[str, list[TierCopy]] = {}
    for place, history in enumerate(histories):
        position = 0
        for checkpoint in history.live:
            key = checkpoint.original_id
            if key in copies:
                position = order.index(key) + 1
            else:
                while position < len(order) and _is_earlier(
                    *_nearest(copies[order[position]], histories), checkpoint, history
                ):
                    position += 1
                order.insert(position, key)
                position += 1
            copies.setdefault(key, []).append(TierCopy(place, checkpoint))
    copies = {
        key: [copy._replace(has_next=copy is not checkpoint_copies[-1]) for copy in checkpoint_copies]
        for key, checkpoint_copies in copies.items()
    }
    merged = History()
    for seq, key in enumerate(order):
        nearest = copies[key][0].checkpoint
        late = {name: value for copy in copies[key][::-1] for name, value in copy.checkpoint.late_metrics.items()}
        merged.by_id[key] = replace(nearest, seq=seq, body=_named(nearest, key), late_metrics=late)
    for history in reversed(histories):
        for name, checkpoint_id in history.tags.items():
            checkpoint = history.by_id[checkpoint_id]
            merged.tags[name] = checkpoint.original_id
        merged.retired.update({checkpoint.original_id: checkpoint for checkpoint in history.retired.values()})
        merged.rolled_back_ids |= {
            checkpoint.original_id for checkpoint in history.live if checkpoint.id in history.rolled_back_ids
        }
        merged.skips += [skip for skip in history.skips if skip not in merged.skips]
        merged.best_by = history.best_by or merged.best_by
    merged.retired = {key: checkpoint for key, checkpoint in merged.retired.items() if key not in merged.by_id}
    wrong = {
        (place, history.by_id[checkpoint_id].original_id): result
        for place, history in enumerate(histories)
        for checkpoint_id, result in damage(history).items()
    }
    return Merged(merged, copies, wrong)


def read_tier(name: str, store: ByteStore, run: str) -> Reach:
    """Read a tier's log. If the tier does not answer, the result has the error; if it lacks the run, neither view nor error."""
    try:
        return Reach(name, store, run, Log(store, run).read())
    except CheckpointNotFound:
        return Reach(name, store, run)
    except ConfigError:
        raise
    except RelightError as error:
        return Reach(name, store, run, None, error)


def recorded_tiers(history: History) -> tuple[Tier, ...]:
    """Return all tiers, nearest first, as the newest NOTE in the nearest tier's log states them; none for a run without."""
    notes = [tiers for _, tiers in TIERS.among(history.notes)]
    return decode_tiers(notes[-1]) if notes else ()


def reach_all(store: ByteStore, run: str) -> list[Reach]:
    """Read every tier of the run, nearest first. The nearest tier's log lists them."""
    near = read_tier("", store, run)
    further = [
        _same_run(near.history, read_tier(tier.name, *open_tier(tier, guard_of(store))))
        for tier in tiers_of(near.history)
    ]
    return [near._replace(name=nearest_name(near.history)), *further]


def _same_run(near: History, reach: Reach) -> Reach:
    """Return ``reach``. If it holds another run, replace its view by an error, so that no listing, scrub or restore merges it."""
    try:
        check_same_run(near, reach)
    except ConfigError as error:
        return reach._replace(view=None, error=error)
    return reach


def _named(checkpoint: Checkpoint, key: str) -> CommitBody:
    return checkpoint.body if checkpoint.id == key else msgspec.structs.replace(checkpoint.body, id=key)


def _nearest(copies: list[TierCopy], histories: Sequence[History]) -> tuple[Checkpoint, History]:
    return copies[0].checkpoint, histories[copies[0].place]


def _attempt(history: History, checkpoint: Checkpoint) -> str:
    """Return the attempt that was in charge when the checkpoint was committed."""
    fences = [fence.body for fence in history.fences if fence.seq < checkpoint.seq]
    return fences[-1].attempt if fences and isinstance(fences[-1], FenceBody) else ""


def _is_earlier(checkpoint: Checkpoint, of: History, other: Checkpoint, far: History) -> bool:
    """Return whether ``checkpoint``, of a nearer tier, came before ``other``, which only the tier with history ``far`` has.

    The order of their attempts in ``far`` decides; if it lacks one of the attempts, the steps decide.
    """
    fences = far.attempts
    own_attempt, other_attempt = _attempt(of, checkpoint), _attempt(far, other)
    if own_attempt in fences and other_attempt in fences and own_attempt != other_attempt:
        return fences.index(own_attempt) < fences.index(other_attempt)
    return checkpoint.body.steps_done < other.body.steps_done


def open_further(tiers: Tiers | None, guard: StoreSecurity) -> Sequence[Further]:
    """Return name, store and run of each further tier. Raise ``ConfigError`` for an invalid store."""
    return [(tier.name, *open_tier(tier, guard)) for tier in (tiers.further if tiers is not None else ())]


def read_further(further: Sequence[Further], near: History) -> list[Reach]:
    """Read each further tier's history. Report a tier that does not answer; raise ``StoreUnavailable`` if it may have
    the only checkpoints.

    Raise ``ConfigError`` if a tier has another run's checkpoints.
    """
    reaches = [read_tier(*tier) for tier in further]
    for reach in reaches:
        check_same_run(near, reach)
    for reach in reaches:
        if reach.error is not None:
            emit(
                "tier.unreachable",
                f"tier {reach.name} does not answer: {reach.error}",
                tier=reach.name,
                kind=reach.error.kind,
            )
    silent = [reach for reach in reaches if reach.error is not None]
    if silent and not near.live and not any(reach.history.live for reach in reaches):
        raise StoreUnavailable(
            f"the nearest tier has no checkpoint, and {', '.join(reach.name for reach in silent)} may have some, but does not answer",
            where=silent[0].store.url,
            hint="repair the connection to it; or, to begin the run from scratch, leave that tier out",
        ) from silent[0].error
    return reaches
