"""Import path of ``forge``."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "format")]


def pytest_configure(config) -> None:  # noqa: ANN001
    """Register the marker ``timeout`` of long tests. It has no effect without pytest-timeout."""
    config.addinivalue_line("markers", "timeout(seconds): how long a test may take")
