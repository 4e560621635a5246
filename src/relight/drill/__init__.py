"""``relight drill``: make a job fail on purpose, and check that it recovers.

Invariants:

- The drill breaks only jobs that it started itself, in its own store, unless the user named a running job.
- Every process that the drill started ends with the drill, however the drill ends.
- A rehearsal passes if the job does what docs/recovery.md describes.

May import everything below it. Only ``job`` and ``script``, which run inside the training processes, import torch.
"""

from relight.drill.drive import DrillOptions, run
from relight.drill.programme import REHEARSALS
from relight.drill.report import DrillReport, RehearsalOutcome

__all__ = ["REHEARSALS", "DrillOptions", "DrillReport", "RehearsalOutcome", "run"]
