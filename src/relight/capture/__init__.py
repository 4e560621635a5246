"""Live objects to a tree, and back: the room that knows torch.

Invariants: values that cannot be saved are refused, all at once, before anything is written. Contiguous host tensors
are never copied, neither at a save nor at a restore. Generators are restored after the loaders were repositioned. May
import: ``layout``, ``format``, ``errors``, ``observe``; and torch, and numpy where it is loaded.
"""

from relight.capture.capture import Captured, capture, capture_generators, fingerprint
from relight.capture.capture_cache import CaptureCache, CapturedTemplate
from relight.capture.classes import class_paths
from relight.capture.environment import differences, environment, environment_soon
from relight.capture.epochs_done import epochs_of
from relight.capture.flat_params import flattened
from relight.capture.kinds import is_component, is_large, kind_of
from relight.capture.load_tree import LoadPlan, build_tree
from relight.capture.loaders import (
    leave_epoch,
    loader_of,
    observe_batches,
    report_steps,
    reset_position,
    unwatch_loaders,
    used,
    watch_loaders,
)
from relight.capture.math_init import warm_up_vector_math
from relight.capture.regions import only_needed, sinks_by_part
from relight.capture.restorable import mismatches
from relight.capture.restore import plan_restore
from relight.capture.restore_plan import RestorePlan
from relight.capture.rng import RngSnapshot
from relight.capture.rng import frozen as frozen_generators
from relight.capture.swap import Swap

__all__ = [
    "CaptureCache",
    "Captured",
    "CapturedTemplate",
    "LoadPlan",
    "RestorePlan",
    "RngSnapshot",
    "Swap",
    "build_tree",
    "capture",
    "capture_generators",
    "class_paths",
    "differences",
    "environment",
    "environment_soon",
    "epochs_of",
    "fingerprint",
    "flattened",
    "frozen_generators",
    "is_component",
    "is_large",
    "kind_of",
    "leave_epoch",
    "loader_of",
    "mismatches",
    "observe_batches",
    "only_needed",
    "plan_restore",
    "report_steps",
    "reset_position",
    "sinks_by_part",
    "unwatch_loaders",
    "used",
    "warm_up_vector_math",
    "watch_loaders",
]
