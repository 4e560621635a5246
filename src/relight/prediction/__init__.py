"""Seeing failures come: what a node was like lately, what that has meant before, and what to do about it.

Always holds: a detector is told looks in order and gives a score with its reason; whether it may speak is decided by what it was worth on
runs that it had not seen. Runs are split by run, never by window. Nothing that is read can be executed. Knows nothing of jobs,
checkpoints or processes: whoever owns a ``Foresight`` tells it. May import ``store`` (to write a file durably), ``observe`` and
``errors``; torch and scikit-learn only where something is trained.
"""

from relight.prediction.host import HostGauges, rss_bytes
from relight.prediction.predictor import Alarm, DetectorStanding, FailurePredictor
from relight.prediction.sample import Accelerator, DiskSpace, Gauges, Host, NodeSample, Rank, SampleShape
from relight.prediction.score import HORIZON_S

__all__ = [
    "HORIZON_S",
    "Accelerator",
    "Alarm",
    "DetectorStanding",
    "DiskSpace",
    "FailurePredictor",
    "Gauges",
    "Host",
    "HostGauges",
    "NodeSample",
    "Rank",
    "SampleShape",
    "rss_bytes",
]  # fmt: skip
