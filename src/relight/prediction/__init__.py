"""Failure prediction: features of a node's recent samples, detectors that score them, an action for each kind of risk.

Invariants: a detector gets feature windows in order and returns a score with its reason. Its alarms count only if it was
precise enough on runs that it was not trained on. Data is split by run, never by window. No file that is read can
execute code. This room does not know jobs, checkpoints or processes: the owner of a ``FailurePredictor`` passes samples.
May import ``store`` (to write a file durably), ``observe``, ``settings``, ``http_request`` and ``errors``; torch and
scikit-learn only for training.
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
