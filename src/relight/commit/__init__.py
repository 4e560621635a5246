"""Write packs, parts and root of a checkpoint, verify them, and commit it; fencing of attempts.

Always holds: an acknowledged checkpoint is durable and reachable by hash from a COMMIT; a fenced attempt never commits; a failed save
leaves only files that a sweep deletes. May import: ``log`` and everything below it.
"""

from relight.commit.attempt import Attempt
from relight.commit.pack_writer import write_pack
from relight.commit.plan import PackPlan, SavePlan, plan_save
from relight.commit.save import CommitTarget, SaveInfo, SaveReport, SaveRequest, delete_directory

__all__ = [
    "Attempt",
    "CommitTarget",
    "PackPlan",
    "SaveInfo",
    "SavePlan",
    "SaveReport",
    "SaveRequest",
    "delete_directory",
    "plan_save",
    "write_pack",
]
