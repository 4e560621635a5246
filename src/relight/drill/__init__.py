"""``relight drill``: what a job does when things fail, tried before it matters: it is broken on purpose, and what follows is looked at.

Always holds: what is broken was started by the drill, and lies in a store of its own, unless a running job was named; every process that
it started ends with it, however it ends; what counts as passed is what docs/recovery.md says. May import everything below it; only
``job`` and ``script``, which run inside the training processes, import torch.
"""

from relight.drill.drive import DrillOptions, run
from relight.drill.programme import REHEARSALS
from relight.drill.report import DrillReport, RehearsalOutcome

__all__ = ["REHEARSALS", "DrillOptions", "DrillReport", "RehearsalOutcome", "run"]
