"""Where the forge is."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]


def pytest_configure(config) -> None:  # noqa: ANN001
    """Long proofs say how long; without pytest-timeout that means nothing."""
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
