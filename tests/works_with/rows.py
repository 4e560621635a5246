"""A plug-in of pytest that writes a row of ``docs/works-with.md`` for each test with the marker ``shows``.

``python -m pytest -p tests.works_with.rows --rows FILE --target NAME TESTS``. A row exists only if its test ran: a test that was skipped
writes none, and a test that failed writes the outcome ``failed``.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest

FAILED = "failed"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the options."""
    parser.addoption("--rows", type=Path, help="write the rows of the tests that ran to this file")
    parser.addoption("--target", help="the target of make that runs these tests")


def pytest_configure(config: pytest.Config) -> None:
    """Collect rows if a file is given."""
    if config.getoption("--rows"):
        config.pluginmanager.register(Rows(config.getoption("--rows"), config.getoption("--target")))


class Rows:
    """The rows of one run of pytest."""

    def __init__(self, path: Path, target: str) -> None:
        self.path, self.target = path, target

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_call(self, item: pytest.Item) -> Any:
        """Add a row for each marker of a test that ran."""
        started, outcome = time.monotonic(), None
        try:
            return (yield)
        except pytest.skip.Exception:
            outcome = "skipped"
            raise
        except BaseException:
            outcome = FAILED
            raise
        finally:
            for mark in item.iter_markers("shows") if outcome != "skipped" else ():
                facts = dict(mark.kwargs)
                add_row(
                    self.path,
                    row(
                        facts["tool"],
                        facts["package"],
                        facts["feature"],
                        outcome or facts["outcome"],
                        facts.get("why", ""),
                        self.target,
                        item.nodeid,
                        time.monotonic() - started,
                    ),
                )


def row(
    tool: str, package: str, feature: str, outcome: str, why: str, target: str, command: str, seconds: float
) -> dict[str, Any]:
    """Return a row. ``package``: its distribution's name, for the version; empty: a part of Python."""
    return {
        "tool": tool,
        "package": package,
        "version": _version(package),
        "feature": feature,
        "outcome": outcome,
        "why": why,
        "target": target,
        "command": command,
        "seconds": round(seconds, 1),
    }


def _version(package: str) -> str:
    try:
        return version(package) if package else "Python's own"
    except PackageNotFoundError:
        return ""


def add_row(path: Path, added: Mapping[str, Any]) -> None:
    """Write a row to a file of results, in place of the row of the same test. The rows are sorted, so that a repeated run changes little."""
    rows = [each for each in json.loads(path.read_text()) if _key(each) != _key(added)] if path.exists() else []
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(sorted([*rows, added], key=_key), indent=1) + "\n")


def _key(each: Mapping[str, Any]) -> tuple[str, ...]:
    return each["tool"].lower(), each["feature"], each["command"]
