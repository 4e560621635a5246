"""For all tests: no setting of the user who runs them reaches the tested code, and no secret of a test leaks."""

from __future__ import annotations

import gc
import os
import signal
import threading
from collections.abc import Generator

import pytest
from tests.children import sitecustomize
from tests.leaks import NOTED, leaks, noted_secrets

__all__ = ["noted_secrets"]

_LONG = ("ranks", "supervise", "drill", "agent", "simulate", "crash", "exact", "prove", "damage")
"""Rooms with the slowest files. They run first, so that several workers end at about the same time."""


def pytest_configure() -> None:
    """Make torch cheaper to import, and undo what a shell does to a background command (``make test &``).

    Such a command ignores SIGINT, and every process that a test starts would inherit that.
    """
    _make_torch_cheaper()
    if threading.current_thread() is threading.main_thread() and signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _make_torch_cheaper() -> None:
    """Install ``tests/children/sitecustomize.py`` in this process and in the interpreters that it starts."""
    sitecustomize.install()
    directory = os.path.dirname(os.path.abspath(sitecustomize.__file__))
    entries = [entry for entry in os.environ.get("PYTHONPATH", "").split(os.pathsep) if entry and entry != directory]
    os.environ["PYTHONPATH"] = os.pathsep.join([directory, *entries])


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Collect the tests without collecting garbage, and exempt the modules and tests from later collections.

    Otherwise a third of the processor time of collecting tests goes to visiting what is there already.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Sort tests of the slowest rooms first."""
    items.sort(key=lambda item: _LONG.index(item.path.parent.name) if item.path.parent.name in _LONG else len(_LONG))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> Generator[None]:
    """Remove ``RELIGHT_…`` variables from a test and its processes, except two defaults. None outlives its test.

    A fixture of the next module would read it.
    """
    before = [name for name in os.environ if name.startswith("RELIGHT_")]
    for name in before:
        monkeypatch.delenv(name)
    monkeypatch.setenv("RELIGHT_EVENTS", "0")  # only tests of event files write some
    monkeypatch.setenv("RELIGHT_BACKGROUND", "0")  # most tests check a save when it returns; tests of the agent set 1
    yield
    for name in [name for name in os.environ if name.startswith("RELIGHT_")]:
        del os.environ[name]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Report a test that leaked a secret as failed."""
    report = yield
    if report.when == "teardown" and report.outcome == "passed" and NOTED in item.stash:
        places = leaks(item.stash[NOTED], report.sections)
        if places:
            report.outcome, report.longrepr = "failed", f"secrets in {places}"
    return report
