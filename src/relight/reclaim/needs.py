"""Who needs whose bytes. What may be recalled needs them as what is live does."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from relight.catalog.branches import needs_of
from relight.log import History, LogView


def users_of(history: History, checkpoint_id: str) -> list[str]:
    """The ids of checkpoints that need its bytes."""
    return [one.id for one in history.there if checkpoint_id in needs_of(history, one)]


def not_needed(history: History, ids: Collection[str]) -> set[str]:
    """Those of ``ids`` that may go together: the most of them of which nobody needs one but such as go, too."""
    going = set(ids)
    needs = {one.id: set(needs_of(history, one)) for one in history.there if one.body.requires}
    while True:
        stays = {donor for user, donors in needs.items() if user not in going for donor in donors} & going
        if not stays:
            return going
        going -= stays


def oldest_together(history: History, ids: Sequence[str], at_most: int | None) -> list[str]:
    """Of ``ids``, oldest first, which may go together: the oldest ``at_most``, or fewer, that may go without the rest; at least the oldest
    with all that need it, however many they are. Else such as need each other would never go."""
    if at_most is None or len(ids) <= at_most:
        return list(ids)
    users = {one: set(users_of(history, one)) for one in ids}
    going: set[str] = set()
    for one in ids:
        group, new = {one}, [one]
        while new:
            new = [user for known in new for user in users.get(known, ()) if user not in group]
            group.update(new)
        if going and len(going | group) > at_most:
            break
        going |= group
    return [one for one in ids if one in going]


def unsure(view: LogView, history: History) -> set[str]:
    """What may be kept by a record of which nothing is known: with a damaged one, or one that nobody trusted has signed, all that is older
    than it. It may be a COMMIT that needs their bytes, a tag, a hold, a branch, a recall."""
    newest = max((fault.seq for fault in view.damaged), default=-1)
    return {one.id for one in (*history.live, *history.retired.values()) if one.seq < newest}


def with_donors(history: History, ids: Iterable[str]) -> list[str]:
    """``ids``, and before them, once each, what of theirs may be recalled as well."""
    found: dict[str, None] = {}
    for one in ids:
        retired = history.retired.get(one)
        for donor in retired.requires if retired is not None else ():
            if donor in history.recallable:
                found[donor] = None
        found[one] = None
    return list(found)
