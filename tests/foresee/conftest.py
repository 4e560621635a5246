"""What these tests share: made-up nodes, and a model of next to nothing."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from relight.foresee.learn import Plan, train
from relight.foresee.model import Model


@pytest.fixture(scope="session")
def learned() -> Model:
    """All detectors, each trained on three runs."""
    return train(Plan(runs=5, seed=2, epochs=2, size=8), lambda text: None)[0]
