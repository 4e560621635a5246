"""For all tests: no setting of the person who runs them reaches what is tested, and no secret of theirs gets out."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Generator

import pytest
from tests.leaks import NOTED, leaks, noted_secrets

__all__ = ["noted_secrets"]

_LONG = ("ranks", "supervise", "drill", "agent", "simulate", "crash", "exact", "prove", "damage")
"""Rooms whose files take longest: given out first, so that several workers end at about the same time."""


def pytest_configure() -> None:
    """Undo what a shell does to a background command (``make test &``): it ignores SIGINT, and every process that a test starts would inherit that."""
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first."""
    items.sort(key=lambda item: _LONG.index(item.path.parent.name) if item.path.parent.name in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """``RELIGHT_…`` variables are what a test sets itself, or absent but for one; also in the processes it starts. None outlives its test:
    a fixture of the next module would read it."""
    before = [name for name in os.environ if name.startswith("RELIGHT_")]
    for name in before:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RELIGHT_EVENTS", "0")  # nothing is kept but by tests that look at it
    monkeypatch.setenv("RELIGHT_BACKGROUND", "0")  # most tests look at what a save did the moment it returns; tests of the agent ask for it
    yield
    for name in [name for name in os.environ if name.startswith("RELIGHT_")]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """A test that has let a secret out has failed, whatever it says."""
    report = yield
    if report.when == "teardown" and report.outcome == "passed" and NOTED in item.stash:
        found = leaks(item.stash[NOTED], report.sections)
        if found:
            report.outcome, report.longrepr = "failed", f"secrets in {found}"
    return report
