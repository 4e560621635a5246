"""Fixtures of the followers' tests. The modules that several of them share are importable."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.observe import Event, subscribe

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Events of one test, in order."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()
