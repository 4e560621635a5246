"""Make this folder's helpers importable, and fail on missing frameworks if all were requested."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
FRAMEWORKS = ("lightning", "transformers", "accelerate", "deepspeed", "megatron", "torchtitan", "ray", "torchft")


def pytest_configure(config: pytest.Config) -> None:
    """Fail instead of skipping under ``make plugins``, which requires all frameworks: a skipped test shows nothing."""
    missing = [name for name in FRAMEWORKS if find_spec(name) is None]
    if os.environ.get("RELIGHT_TEST_ALL_PLUGINS") == "1" and missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}")
