"""Make the helpers importable: made-up nodes and a minimal model."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from relight.prediction.learn import LearningPlan, train
from relight.prediction.model import DetectorModel


@pytest.fixture(scope="session")
def learned() -> DetectorModel:
    """Train all detectors on three runs each."""
    return train(LearningPlan(runs=5, seed=2, epochs=2, size=8), lambda text: None)[0]
