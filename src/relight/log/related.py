"""Whether two logs hold one history: by checkpoint ids and attempts, never by step numbers."""

from __future__ import annotations

from typing import NamedTuple

from relight.errors import CheckpointNotFound
from relight.log.history import Checkpoint, History, fold
from relight.log.log import Log
from relight.store import ByteStore

CONTINUES, BACK, APART, UNRELATED = "continues", "back", "apart", "unrelated"


class Change(NamedTuple):
    """What a copy changes in the destination's run: its latest checkpoint, before and after, and what only the destination has."""

    relation: str
    """``continues``; ``back``: to an earlier checkpoint of the same history; ``apart``: both went on since they parted; ``unrelated``."""
    before: Checkpoint
    after: Checkpoint
    only_there: list[Checkpoint]
    """Live checkpoints of the destination that the source neither has nor had, oldest first."""

    @property
    def why(self) -> str:
        """Why the copy is refused, as the end of a sentence about the destination's run."""
        now, new = f"step {self.before.step} ({self.before.id})", f"step {self.after.step} ({self.after.id})"
        if self.relation == BACK:
            return f"is at {now}: with a copy of {new} as its newest checkpoint, it would resume from that earlier one"
        have = f"has {len(self.only_there)} that the source has not; {new} would replace {now} as its latest"
        if self.relation == APART:
            return f"went its own way since the last checkpoint that both have: it {have}"
        return f"holds another history, without one checkpoint of the source: it {have}"


def known_ids(history: History) -> dict[str, int]:
    """Ids, as the first run knew them, of all that a history has, had, or was resumed from; with the record number by which it had them."""
    found: dict[str, int] = {}
    committed = [*history.live, *history.retired.values()]
    for one in committed:
        found[one.original_id] = min(one.seq, found.get(one.original_id, one.seq))
    for one in committed:
        for parent in one.body.parents:  # resumed from another tier or store, whose checkpoint this log never committed
            found.setdefault(parent, one.seq)
    return found


def whole_history(store: ByteStore, run: str) -> History:
    """Fold every record of a run's log, without a summary. An empty history if there is no such run."""
    try:
        return fold(Log(store, run, whole=True).read())
    except CheckpointNotFound:
        return History()


def change(source: History, one: Checkpoint, there: History) -> Change | None:
    """What ``one`` of ``source`` would change as the newest checkpoint of ``there``. None if ``there`` has none."""
    if not there.live:
        return None
    known, newest = known_ids(source), there.live[-1]
    only = [copy for copy in there.live if copy.original_id not in known]
    at = known.get(newest.original_id)
    if at is not None:
        relation = CONTINUES if at <= one.seq else BACK
    else:
        relation = APART if not known.keys().isdisjoint(known_ids(there)) else UNRELATED
    before = next((copy for copy in reversed(there.live) if copy.id not in there.rolled_back_ids), newest)
    return Change(relation, before, one, only)


def are_unrelated(near: History, far: History) -> bool:
    """Whether two tiers hold checkpoints of different runs: they share no checkpoint and no attempt."""
    if not near.live or not far.live or not set(near.attempts).isdisjoint(far.attempts):
        return False
    return known_ids(near).keys().isdisjoint(known_ids(far))
