"""Finding and reading: a run's checkpoints by id, step, tag, metric; their tensors, verified; what is damaged.

Always holds: the newest good one is found if there is one, and what was skipped is said; no byte is handed out unchecked. May import:
``log`` and everything below it. Never writes but for tags and copies.
"""

from relight.catalog.find import candidates, resolve
from relight.catalog.opened import Opened, open_checkpoint
from relight.catalog.read import check_pack, read_tensors
from relight.catalog.run import Run, list_runs, open_run
from relight.catalog.verify import VerifyFinding, verify_checkpoint, verify_log

__all__ = [
    "Opened",
    "Run",
    "VerifyFinding",
    "candidates",
    "check_pack",
    "list_runs",
    "open_checkpoint",
    "open_run",
    "read_tensors",
    "resolve",
    "verify_checkpoint",
    "verify_log",
]
