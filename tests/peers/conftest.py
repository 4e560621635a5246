"""Make ``neighbours`` importable, and provide one nursery for all tests of a file."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from neighbours import Nursery


@pytest.fixture(params=[False, True], ids=["clear", "tls"])
def tls(request: pytest.FixtureRequest) -> bool:
    """Return whether the agents encrypt their connections."""
    return bool(request.param)


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    """Yield a process that forks agents quickly."""
    with Nursery() as processes:
        yield processes
