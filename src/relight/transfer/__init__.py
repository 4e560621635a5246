"""Checkpoints from one store to another. May import: ``commit``, ``catalog`` and everything below them."""

from relight.transfer.copying import CopyPlan, CopyReport, execute_copy, plan_copy

__all__ = ["CopyPlan", "CopyReport", "execute_copy", "plan_copy"]
