"""Run the tasks of a heavy command: in this process, in local processes, or on Ray.

Invariants: at most ``jobs`` tasks run at the same time, and they begin in order; the task of a lost process runs again. So a task is
idempotent, and its function and arguments can be pickled. May import: ``comm`` and everything below it.
"""

from relight.engines.engine import ENGINES, IN_PROCESS, Engine

__all__ = ["ENGINES", "IN_PROCESS", "Engine"]
