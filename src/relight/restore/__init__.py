"""Restores: which checkpoint, from which copy, and its bytes into the live objects of each rank.

Invariants: all ranks restore the same checkpoint, which verifies for each of them. The nearest copy that verifies is
used: memory of this node, memory of its peers, then the store and further tiers. A checkpoint is skipped only if the
newest one is wanted, and each skipped one is reported.
"""

from relight.restore.resume import Resumed
from relight.restore.resume_from_rank_0 import resume_any

__all__ = ["Resumed", "resume_any"]
