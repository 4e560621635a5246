"""Find and read a run's checkpoints: by id, step, tag or metric; their verified tensors; their damage.

Invariants: if a good checkpoint exists, the newest one is found, and skipped checkpoints are reported. No byte is returned unchecked.
May import ``log`` and everything below it. Writes nothing but tags and copies.
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
