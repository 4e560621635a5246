"""Checkpoints of several ranks that one rank wrote: one part holds everything.

The part's component ``rank`` holds the own states of ranks 1 and up. Rank 0's own state is stored where a single process would store it,
so other readers see a checkpoint of a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.errors import UnsafeContent
from relight.format import Root
from relight.format.root_keys import RANKS

OWN = "rank"
"""Component of a part's tree with its rank's own state. If one rank wrote everything: the own states of all ranks but rank 0."""


def saved_by(root: Root) -> int:
    """Return the number of ranks that saved the checkpoint."""
    count = RANKS.read(root.user)
    return count if root.world == 1 and count is not None and 1 < count <= 10**7 else root.world


def apart(root: Root, tree: Any, where: str) -> tuple[Any, tuple[Any, ...]]:
    """Return the common tree of a checkpoint with one part, and each rank's own state, by rank. Rank 0's own state is in the common tree.

    Raise ``UnsafeContent`` if the number of own states differs from the number of ranks.
    """
    count = saved_by(root)
    if count == 1 or not isinstance(tree, dict):
        return tree, (tree,)
    other_ranks = tree.get(OWN)
    if (
        not isinstance(other_ranks, list)
        or len(other_ranks) != count - 1
        or not all(isinstance(tree_of_rank, dict) for tree_of_rank in other_ranks)
    ):
        raise UnsafeContent(f"{count} ranks saved this, but it does not have each rank's own state", where=where)
    common = {name: node for name, node in tree.items() if name != OWN}
    return common, (common, *other_ranks)


def with_own(tree: Any, own: Sequence[Any], rank: int) -> Any:
    """Return the tree of a rank."""
    return {**tree, **own[rank % len(own)]} if len(own) > 1 else tree
