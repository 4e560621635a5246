"""Dependencies between checkpoints: which checkpoints need bytes of which others.

Recallable ones have the same needs as live ones.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from relight.catalog.branches import needs_of
from relight.log import History, LogView


def users(history: History) -> dict[str, list[str]]:
    """Return the ids of the checkpoints that need another's bytes, by the other's id. Reads the history once."""
    by_donor: dict[str, list[str]] = {}
    for checkpoint in history.there:
        if checkpoint.body.requires:
            for donor in needs_of(history, checkpoint):
                by_donor.setdefault(donor, []).append(checkpoint.id)
    return by_donor


def not_needed(history: History, ids: Collection[str]) -> set[str]:
    """Return the largest subset of ``ids`` that may go together: no checkpoint outside the subset needs one of them."""
    going = set(ids)
    needs = {
        checkpoint.id: set(needs_of(history, checkpoint)) for checkpoint in history.there if checkpoint.body.requires
    }
    while True:
        stays = {donor for user, donors in needs.items() if user not in going for donor in donors} & going
        if not stays:
            return going
        going -= stays


def oldest_together(history: History, ids: Sequence[str], at_most: int | None) -> list[str]:
    """Return the oldest of ``ids`` that may go without the rest. ``ids`` are sorted, oldest first, and may go together.

    At most ``at_most``, but at least the oldest with all that need it, however many: otherwise a long chain would never go.
    """
    if at_most is None or len(ids) <= at_most:
        return list(ids)
    allowed, by_donor = set(ids), users(history)
    going: set[str] = set()
    for checkpoint_id in ids:
        group, new = {checkpoint_id}, [checkpoint_id]
        while new:
            new = [user for known in new if known in allowed for user in by_donor.get(known, ()) if user not in group]
            group.update(new)
        if going and len(going | group) > at_most:
            break
        going |= group
    return [checkpoint_id for checkpoint_id in ids if checkpoint_id in going]


def unsure(view: LogView, history: History) -> set[str]:
    """Return the ids that an unreadable record may keep: all older than the newest damaged or untrusted record.

    That record may be a COMMIT that needs their bytes, a tag, a hold, a branch or a recall.
    """
    newest = max((fault.seq for fault in view.damaged), default=-1)
    return {checkpoint.id for checkpoint in (*history.live, *history.retired.values()) if checkpoint.seq < newest}


def with_donors(history: History, ids: Iterable[str]) -> list[str]:
    """Return ``ids`` without duplicates, each after those of its donors that are recallable."""
    ordered: dict[str, None] = {}
    for checkpoint_id in ids:
        retired = history.retired.get(checkpoint_id)
        for donor in retired.requires if retired is not None else ():
            if donor in history.recallable:
                ordered[donor] = None
        ordered[checkpoint_id] = None
    return list(ordered)
