"""Experiment trackers as components of a Checkpointer: a resume continues the same tracker run, each step once.

``TensorBoard``, ``WandB`` and ``MLflow`` import their package when they are made. ``Tracker`` is the base class for any
other. May import: as ``relight.integrations``.
"""

from relight.integrations.trackers.mlflow import MLflow
from relight.integrations.trackers.rows import CheckpointLink, RelightNumbers, StepRow
from relight.integrations.trackers.tensorboard import TensorBoard
from relight.integrations.trackers.tracker import Tracker
from relight.integrations.trackers.wandb import WandB

__all__ = ["CheckpointLink", "MLflow", "RelightNumbers", "StepRow", "TensorBoard", "Tracker", "WandB"]
