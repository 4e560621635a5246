"""Tests of this folder find its helpers; and no framework is missing where all are asked for."""

import os
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
FRAMEWORKS = ("lightning", "transformers", "accelerate", "deepspeed", "megatron", "torchtitan", "ray", "torchft")


def pytest_configure(config: pytest.Config) -> None:
    """``make plugins`` asks for all of them: a test that is skipped has shown nothing."""
    missing = [name for name in FRAMEWORKS if find_spec(name) is None]
    if os.environ.get("RELIGHT_TEST_ALL_PLUGINS") == "1" and missing:
        raise pytest.UsageError(f"not installed: {', '.join(missing)}")
