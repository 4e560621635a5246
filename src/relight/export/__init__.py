"""Export a checkpoint's tensors as files that other tools read.

Invariants: every byte is verified before it is written. Memory is bounded, whatever a checkpoint's size. A target gets
its name only when all of it is durable. May import: ``catalog``, ``commit`` and everything below them; numpy, never torch.
"""

from relight.export.average import Mixture, ema_weights, mixture, save_average
from relight.export.execute import ExportReport, execute_export
from relight.export.plan import ExportPlan, plan_export
from relight.export.selection import Options

__all__ = [
    "ExportPlan",
    "ExportReport",
    "Mixture",
    "Options",
    "ema_weights",
    "execute_export",
    "mixture",
    "plan_export",
    "save_average",
]
