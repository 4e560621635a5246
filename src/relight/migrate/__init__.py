"""A whole directory of old checkpoints, over into a store: found, brought in by several processes, checked, and taken back if need be.

Always holds: what was brought is committed in the order of its steps, once, whoever is killed; what is taken back is exactly that. A
journal in the store says what was done. May import: ``foreign``, ``export``, ``reclaim`` and everything below them; never torch.
"""

from relight.migrate.execute import MigrateReport, execute_migration
from relight.migrate.plan import MigratePlan, plan_migration
from relight.migrate.undo import RollBackReport, roll_back

__all__ = ["MigratePlan", "MigrateReport", "RollBackReport", "execute_migration", "plan_migration", "roll_back"]
