"""Make this folder's helpers importable, and fail on missing trackers if all were requested."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
PACKAGES = ("tensorboard", "wandb", "mlflow")


def pytest_configure(config: pytest.Config) -> None:
    """Fail instead of skipping under ``make trackers``, which requires all of them: a skipped test shows nothing."""
    missing = [name for name in PACKAGES if find_spec(name) is None]
    if os.environ.get("RELIGHT_TEST_ALL_TRACKERS") == "1" and missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}")
