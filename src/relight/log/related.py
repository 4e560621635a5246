"""Compare the histories of two logs: by checkpoint ids and attempts, never by step numbers."""

from __future__ import annotations

from typing import NamedTuple

from relight.errors import CheckpointNotFound
from relight.log.history import Checkpoint, History, fold
from relight.log.log import Log
from relight.store import ByteStore

CONTINUES, BACK, APART, UNRELATED = "continues", "back", "apart", "unrelated"


class Change(NamedTuple):
    """Effect of a copy on the destination's run: its latest checkpoint before and after, and the checkpoints that only it has."""

    relation: str
    """``continues``; ``back``: to an earlier checkpoint of the same history; ``apart``: both have new checkpoints; ``unrelated``."""
    before: Checkpoint
    after: Checkpoint
    only_there: list[Checkpoint]
    """Live checkpoints of the destination that the source has never had, oldest first."""

    @property
    def why(self) -> str:
        """Reason why the copy is refused, as the end of a sentence about the destination's run."""
        now, new = f"step {self.before.step} ({self.before.id})", f"step {self.after.step} ({self.after.id})"
        if self.relation == BACK:
            return f"is at {now}: with a copy of {new} as its newest checkpoint, it would resume from that earlier one"
        have = f"has {len(self.only_there)} that the source has not; {new} would replace {now} as its latest"
        if self.relation == APART:
            return f"went its own way since the last checkpoint that both have: it {have}"
        return f"holds another history, without one checkpoint of the source: it {have}"


def known_ids(history: History) -> dict[str, int]:
    """Return the original ids of all checkpoints that a history has, had, or resumed from, each with its first record number."""
    seqs: dict[str, int] = {}
    committed = [*history.live, *history.retired.values()]
    for checkpoint in committed:
        seqs[checkpoint.original_id] = min(checkpoint.seq, seqs.get(checkpoint.original_id, checkpoint.seq))
    for checkpoint in committed:
        # resumed from another tier or store: this log never committed that checkpoint
        for parent in checkpoint.body.parents:
            seqs.setdefault(parent, checkpoint.seq)
    return seqs


def whole_history(store: ByteStore, run: str) -> History:
    """Fold every record of a run's log, without a summary. Return an empty history if the run does not exist."""
    try:
        return fold(Log(store, run, whole=True).read())
    except CheckpointNotFound:
        return History()


def change(source: History, checkpoint: Checkpoint, target: History) -> Change | None:
    """Return how ``checkpoint`` of ``source`` as the newest checkpoint would change ``target``.

    None if ``target`` has no checkpoint.
    """
    if not target.live:
        return None
    known, newest = known_ids(source), target.live[-1]
    only = [copy for copy in target.live if copy.original_id not in known]
    known_at = known.get(newest.original_id)
    if known_at is not None:
        relation = CONTINUES if known_at <= checkpoint.seq else BACK
    else:
        relation = APART if not known.keys().isdisjoint(known_ids(target)) else UNRELATED
    before = next((copy for copy in reversed(target.live) if copy.id not in target.rolled_back_ids), newest)
    return Change(relation, before, checkpoint, only)


def are_unrelated(near: History, far: History) -> bool:
    """Return whether two tiers hold checkpoints of different runs: they share no checkpoint and no attempt."""
    if not near.live or not far.live or not set(near.attempts).isdisjoint(far.attempts):
        return False
    return known_ids(near).keys().isdisjoint(known_ids(far))
