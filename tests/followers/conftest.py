"""Fixtures of the followers' tests."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from relight.observe import Event, subscribe


@pytest.fixture
def events() -> Iterator[list[Event]]:
    """Events of one test, in order."""
    received: list[Event] = []
    undo = subscribe(received.append)
    yield received
    undo()
