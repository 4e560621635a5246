"""A checkpoint of several ranks that one of them wrote: one part that holds everything, and under ``rank`` what ranks from 1 on had of
their own. What rank 0 had lies where one process has it, so that all else reads it as one of a single process.
"""

from __future__ import annotations

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


def apart(root: Root, tree: Any, where: str) -> tuple[Any, tuple[dict[Any, Any], ...]]:
    """What is common, and what each rank had besides, by rank, if several made this one part; else ``tree``, and nothing.

    ``UnsafeContent`` if there are not as many as there were ranks.
    """
    count = saved_by(root)
    if root.world > 1 or count == 1 or not isinstance(tree, dict):
        return tree, ()
    others = tree.get(OWN)
    if not isinstance(others, list) or len(others) != count - 1 or not all(isinstance(one, dict) for one in others):
        raise UnsafeContent(f"{count} ranks saved this, but it does not hold what each had of its own", where=where)
    return {name: node for name, node in tree.items() if name != OWN}, ({}, *others)


def tree_of(root: Root, tree: Any, rank: int, where: str) -> Any:
    """The tree of a rank, from that of the one part."""
    common, own = apart(root, tree, where)
    return {**common, **own[rank % len(own)]} if own else common
