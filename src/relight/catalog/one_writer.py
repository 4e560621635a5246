"""A checkpoint of several ranks that one of them wrote: one part that holds everything, and under ``rank`` what ranks from 1 on had of
their own. What rank 0 had lies where one process has it, so that all else reads it as one of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.errors import UnsafeContent
from relight.format import Root

RANKS = "relight.ranks"
"""In a root's ``user``: how many ranks there were."""
OWN = "rank"
"""The component of a part's tree that is its rank's own; of the one part, those of all ranks but the first."""


def saved_by(root: Root) -> int:
    """How many ranks saved it."""
    count = root.user.get(RANKS)
    return count if root.world == 1 and type(count) is int and 1 < count <= 10**7 else root.world


def apart(root: Root, tree: Any, where: str) -> tuple[Any, tuple[Any, ...]]:
    """The tree of a checkpoint of one part, and what each of the ranks that made it had of its own, by rank: of rank 0 that is in the tree.

    ``UnsafeContent`` if there are not as many as there were ranks.
    """
    count = saved_by(root)
    if count == 1 or not isinstance(tree, dict):
        return tree, (tree,)
    others = tree.get(OWN)
    if not isinstance(others, list) or len(others) != count - 1 or not all(isinstance(one, dict) for one in others):
        raise UnsafeContent(f"{count} ranks saved this, but it does not hold what each had of its own", where=where)
    common = {name: node for name, node in tree.items() if name != OWN}
    return common, (common, *others)


def with_own(tree: Any, own: Sequence[Any], rank: int) -> Any:
    """The tree of a rank."""
    return {**tree, **own[rank % len(own)]} if len(own) > 1 else tree
