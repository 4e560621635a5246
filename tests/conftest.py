"""For all tests: no setting of the person who runs them reaches what is tested."""

from __future__ import annotations

import os

import pytest


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    """``RELIGHT_…`` variables are what a test sets itself, or absent but for one; also in the processes it starts."""
    for name in [name for name in os.environ if name.startswith("RELIGHT_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RELIGHT_BACKGROUND", "0")  # most tests look at what a save did the moment it returns; tests of the agent ask for it
