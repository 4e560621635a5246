"""Read checkpoints: open a root and its parts, read and verify tensors, describe what is stored.

Invariant: no byte is returned unchecked, but for mapped files, which say so. May import ``log`` and everything below it. Writes nothing.
"""

from relight.reader.chunk_reader import check_pack, read_tensors
from relight.reader.opened import Opened, open_checkpoint
from relight.reader.verify import VerifyFinding, verify_checkpoint, verify_checkpoints, verify_log

__all__ = [
    "Opened",
    "VerifyFinding",
    "check_pack",
    "open_checkpoint",
    "read_tensors",
    "verify_checkpoint",
    "verify_checkpoints",
    "verify_log",
]
