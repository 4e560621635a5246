"""What the log states about damage: which checkpoints were found damaged once, and which were removed while they were read."""

from __future__ import annotations

from relight.errors import CheckpointNotFound, RelightError
from relight.format.topics import VERIFIED
from relight.log.history import History, fold
from relight.log.log import Log
from relight.store import ByteStore

REMOVED_TRIES = 3
"""How many times a reader that takes any checkpoint reads the log, if retention keeps removing what it reads."""


def once_damaged(history: History) -> set[str]:
    """Return the ids of the checkpoints that a verification, a restore or a repair has ever found damaged, also of repaired ones.

    A repair may have written a whole pack next to the damaged stored chunks. New saves and copies would refer to these chunks.
    """
    return {note.damaged for _, note in VERIFIED.among(history.notes) if note.damaged}


def was_removed(store: ByteStore, run: str, checkpoint_id: str) -> bool:
    """Return whether a run no longer has a checkpoint that a reader found damaged. Retention then deleted its files.

    Return False if the log cannot be read. Cost: one read of the log.
    """
    try:
        return fold(Log(store, run).read()).find(checkpoint_id) is None
    except CheckpointNotFound:
        return True
    except RelightError:
        return False
