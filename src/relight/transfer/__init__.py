"""Checkpoints from one store to another.

Always holds: what arrives was verified byte by byte on the way, and is committed under the destination's own identity; nobody
is fenced; what was interrupted leaves nothing that counts. May import: ``commit``, ``catalog`` and everything below them.
"""

from relight.transfer.copying import CopyPlan, CopyReport, execute_copy, plan_copy

__all__ = ["CopyPlan", "CopyReport", "execute_copy", "plan_copy"]
