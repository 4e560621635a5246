"""Find a run's checkpoints: by path, id, step, tag or metric, over all its tiers; move tags.

Invariant: if a good checkpoint exists, the newest one is found, and skipped checkpoints are reported. May import ``reader``,
``run_records``, ``log`` and everything below them. Writes nothing but tags and the list of a run's tiers.
"""

from relight.catalog.find import candidates, resolve
from relight.catalog.run import Run, list_runs, open_run

__all__ = ["Run", "candidates", "list_runs", "open_run", "resolve"]
