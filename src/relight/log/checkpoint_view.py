"""Texts about a checkpoint, for its view in a shell and in a notebook."""

from __future__ import annotations

import time
from collections.abc import Mapping

from relight.format.records import Metric
from relight.log.identity import seconds_since_epoch
from relight.units import age_text

METRICS_MAX = 3


def age_of(recorded: str) -> str:
    """Return how long ago a record's time was, by this host's clock; the text itself if it is not a time."""
    then = seconds_since_epoch(recorded)
    return recorded if then is None else age_text(time.time() - then)


def first_metrics(metrics: Mapping[str, Metric]) -> str:
    """Return the first metrics as ``loss=1.234 …``."""
    texts = [f"{k}={value:.6g}" if isinstance(value, float) else f"{k}={value}" for k, value in metrics.items()]
    return " ".join(texts[:METRICS_MAX] + (["…"] if len(texts) > METRICS_MAX else []))
