"""Import a whole directory of old checkpoints into a store: find them, convert them in several processes, check them, or roll back.

Invariants: checkpoints are committed once, in the order of their steps, whichever process is killed; a rollback removes exactly these. A
journal in the store records what was done. May import: ``importers``, ``export``, ``reclaim`` and everything below them; never torch.
"""

from relight.migrate.execute import MigrateReport, execute_migration
from relight.migrate.plan import MigratePlan, plan_migration
from relight.migrate.undo import RollBackReport, roll_back

__all__ = ["MigratePlan", "MigrateReport", "RollBackReport", "execute_migration", "plan_migration", "roll_back"]
