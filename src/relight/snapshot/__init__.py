"""Stall-free snapshots: copy the state of a call while the next forward and backward run, and detect tensors that
changed.

Invariant: a tensor in a finished snapshot has the bytes it had at the call, or the snapshot names it as touched. May
import torch, ``layout``, ``policy``, ``observe``, ``errors``.
"""

from relight.snapshot.copier import Copier, Snapshot
from relight.snapshot.device import DeviceCopies, DeviceSnapshot, Placed, segments
from relight.snapshot.frozen import FrozenTensors, TensorMarks
from relight.snapshot.hooks import OptimizerHook, StepHook, can_overlap
from relight.snapshot.touch_detection import GuardedTensors, SmallCopies

__all__ = [
    "Copier",
    "DeviceCopies",
    "DeviceSnapshot",
    "FrozenTensors",
    "GuardedTensors",
    "OptimizerHook",
    "Placed",
    "SmallCopies",
    "Snapshot",
    "StepHook",
    "TensorMarks",
    "can_overlap",
    "segments",
]
