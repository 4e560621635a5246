"""Packs, parts and root to one checkpoint, once: writing, checking, the commit, fencing.

Always holds: nothing is acknowledged that is not durable and reachable by hash from a COMMIT; a fenced attempt never commits; a save that
fails leaves nothing behind but what is swept later. May import: ``log`` and everything below it.
"""

from relight.commit.attempt import Attempt
from relight.commit.pack_writer import write_pack
from relight.commit.plan import PackPlan, SavePlan, plan_save
from relight.commit.save import CommitTarget, SaveReport, SaveRequest, delete_directory

__all__ = ["Attempt", "CommitTarget", "PackPlan", "SavePlan", "SaveReport", "SaveRequest", "delete_directory", "plan_save", "write_pack"]
