"""The banner about firing alerts: on every page, for the runs that the caller may see."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.made_server import Server, serving
from tests.serve.many_runs import make_many_runs

from relight.serve.pages import PAGES


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server over two runs. Each has several failures, and an alert fires for it."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    with serving([make_many_runs(tmp_path / "runs", 2, 3)], tmp_path) as made:
        ends = time.monotonic() + 60
        while len(made.get("/api/v1/alerts").json()) < 2 and time.monotonic() < ends:
            time.sleep(0.2)
        yield made


def test_every_page_has_the_banner(server: Server) -> None:
    """Each page has the banner with each alert's run, reason and command, and the badge counts the alerts."""
    pages = [page.path for page in PAGES if "{" not in page.path] + ["/runs/runs/run-000"]
    for path in pages:
        text = server.get(path, "admin").text
        assert 'id="alerts"' in text and "2 alerts</a>" in text and "failures within an hour" in text, path
    assert 'id="badge" href="#alerts" hidden' in server.client.get("/login").text


def test_alerts_are_within_the_scope(server: Server) -> None:
    """The API lists alerts with reason, time and command. A token with a scope gets those of its runs."""
    rows = server.get("/api/v1/alerts").json()
    assert {row["run"] for row in rows} == {"run-000", "run-001"} and {row["store"] for row in rows} == {"runs"}
    assert all(row["why"] and row["since"] and row["hint"].startswith("relight ") for row in rows)
    assert {row["run"] for row in server.get("/api/v1/alerts", "scoped").json()} == {"run-000"}
    text = server.get("/", "scoped").text
    assert "1 alert</a>" in text and "run-001" not in text
