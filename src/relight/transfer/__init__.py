"""Copy checkpoints from one store to another.

Invariants: every copied byte is verified on the way; a copy is committed under the destination's own identity and fences no attempt; an
interrupted copy leaves no checkpoint. May import: ``commit``, ``catalog`` and everything below them.
"""

from relight.transfer.copying import CopyPlan, CopyReport, plan_copy
from relight.transfer.shared_copy import execute_copy

__all__ = ["CopyPlan", "CopyReport", "execute_copy", "plan_copy"]
