"""What may go: plan, retire in the log, then delete. May import: ``commit``, ``catalog`` and everything below them.

Always holds: nothing is deleted that a live checkpoint needs, or one that may be recalled, whatever is damaged and whoever else is at work.
A file is deleted only (a) under a checkpoint that a RETIRE record, read back from the log, has taken out of the history for good, or a
SWEEP behind it, or (b) under an attempt that a FENCE has superseded, and that no record commits, in a log without a damaged record.
Unknown files are never deleted.
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
