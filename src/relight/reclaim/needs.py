"""Who needs whose bytes. What may be recalled needs them as what is live does."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from relight.log import Checkpoint, History


def users_of(history: History, checkpoint_id: str) -> list[str]:
    """The ids of checkpoints that need its bytes."""
    return [one.id for one in _there(history) if checkpoint_id in one.body.requires]


def not_needed(history: History, ids: Collection[str]) -> set[str]:
    """Those of ``ids`` that may go together: the most of them of which nobody needs one but such as go, too."""
    going = set(ids)
    needs = {one.id: set(one.body.requires) for one in _there(history) if one.body.requires}
    while True:
        stays = {donor for user, donors in needs.items() if user not in going for donor in donors} & going
        if not stays:
            return going
        going -= stays


def with_donors(history: History, ids: Iterable[str]) -> list[str]:
    """``ids``, and before them, once each, what of theirs may be recalled as well."""
    found: dict[str, None] = {}
    for one in ids:
        retired = history.retired.get(one)
        for donor in retired.body.requires if retired is not None else ():
            if donor in history.recallable:
                found[donor] = None
        found[one] = None
    return list(found)


def _there(history: History) -> list[Checkpoint]:
    return [*history.live, *(history.retired[one] for one in history.recallable)]
