"""Restores: which checkpoint, from which copy, and its bytes into the live objects of each rank.

Invariants: all ranks restore the same checkpoint, which verifies for each of them. The nearest copy that verifies is
used: memory of this node, memory of its peers, then the store and further tiers. A checkpoint is skipped only if the
newest one is wanted, and each skipped one is reported.
"""

from relight.restore.execute import restore_state
from relight.restore.request import RestoreRequest
from relight.restore.result import Resumed

__all__ = ["RestoreRequest", "Resumed", "restore_state"]
