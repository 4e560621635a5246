"""Retention and garbage collection: plan, retire in the log, then delete. May import: ``commit``, ``catalog`` and everything below them.

Invariant: no bytes are deleted that a live or recallable checkpoint needs, whatever is damaged and whichever processes run at once.
A file is deleted only in one of two cases. (a) It belongs to a checkpoint that a RETIRE record, or a later SWEEP, has retired for good; the
record was read back from the log. (b) It belongs to an attempt that a FENCE has superseded, no record commits it, and no record of the log
is damaged. Unknown files are never deleted.
"""

from relight.reclaim.prune import PrunePlan, PruneReport, execute, plan_prune, prune_a_share
from relight.reclaim.rebuild import RebuildPlan, RebuildReport, execute_rebuild, plan_rebuild
from relight.reclaim.recall import due_of, recall, sweep_recallable
from relight.reclaim.room import SpaceGuard
from relight.reclaim.sweep import SweepPlan, SweepReport, execute_sweep, plan_sweep

__all__ = [
    "PrunePlan",
    "PruneReport",
    "RebuildPlan",
    "RebuildReport",
    "SpaceGuard",
    "SweepPlan",
    "SweepReport",
    "due_of",
    "execute",
    "execute_rebuild",
    "execute_sweep",
    "plan_prune",
    "plan_rebuild",
    "plan_sweep",
    "prune_a_share",
    "recall",
    "sweep_recallable",
]
