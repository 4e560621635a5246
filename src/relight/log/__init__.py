"""The run's log: create-once, numbered, hash-chained records, folded into a history. The only authority on what exists.

Always holds: one commit point (the exclusive creation of the next record); no clock decides anything; a damaged record loses itself only.
May import: ``store``, ``keys``, ``format``, ``errors``, ``observe``.
"""

from relight.log.ancestors import FRESH, line_of, newest_good
from relight.log.history import Checkpoint, History, fold
from relight.log.identity import read_store, require_store
from relight.log.log import Log
from relight.log.view import Fault, LogView

__all__ = [
    "FRESH", "Checkpoint", "Fault", "History", "Log", "LogView", "fold", "line_of", "newest_good", "read_store", "require_store",
]  # fmt: skip
