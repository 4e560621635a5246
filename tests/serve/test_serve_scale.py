"""Times of a server with fifty runs and five thousand checkpoints: reading them, and answering each page and request.

A limit applies to the least of some tries, because other processes use the processor too. The measured times are printed.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.format.forge import request
from tests.serve.made_server import HOST, Server, TestClient, serving
from tests.serve.many_runs import make_many_runs
from tests.serve.test_serve_roles import routes

from relight.commit import Attempt
from relight.serve.app import OPEN, ServerSettings, create_app
from relight.serve.reader import open_readers
from relight.store import open_bytes

RUNS, CHECKPOINTS = 50, 100
FIRST_S, PAGE_S, TRIES = 1.0, 0.3, 5
POLL_S = 0.5
"""Seconds that a poll of an unchanged store may take."""


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make the store, and return its directory."""
    return make_many_runs(tmp_path_factory.mktemp("scale") / "runs", RUNS, CHECKPOINTS)


@pytest.fixture(scope="module")
def server(root: Path) -> Iterator[Server]:
    """Yield a server that has read the store."""
    with serving([root], root.parent) as made:
        yield made


def addresses(server: Server) -> list[str]:
    """Return every address of a GET for one run, and lists with their longest pieces.

    Addresses of one task are left out, because there is no task.
    """
    name = "run-025"
    ids = [item.id for item in server.app.state.readers[0].now.runs[name].history.live]
    incident = next(item.id for item in server.app.state.readers[0].now.runs[name].incidents)
    paths = []
    for method, path, role in routes(server.app):
        if method != "GET" or path in OPEN or path == "/events" or role is None or "{task}" in path:
            continue
        parts = {"store": "runs", "run": name, "which": incident if "incidents" in path else "latest"}
        paths.append(re.sub(r"\{(\w+)(?::\w+)?\}", lambda part: parts[part[1]], path))
    paths += [
        "/api/v1/runs?limit=500",
        f"/api/v1/runs/runs/{name}/checkpoints?limit=500",
        "/api/v1/incidents?limit=500",
    ]
    spec = f"?a=runs/{name}@{ids[3]}&b=runs/{name}@{ids[40]}"
    latest = f"/api/v1/runs/runs/{name}/checkpoints/latest"
    ends = time.monotonic() + 20
    while not (tensors := server.get(latest).json()["tensors"]) and time.monotonic() < ends:
        time.sleep(0.05)
    asks = {
        f"/api/v1/runs/runs/{name}/series": "?name=loss",
        "/compare": spec,
        "/api/v1/diff": spec,
        f"{latest}/values": f"?path={tensors[0]['path']}",
    }
    return [item + asks.get(item, "") for item in paths]


def least(server: Server, address: str, tries: int = TRIES) -> tuple[float, Any]:
    """Return the least time of some tries, and the last answer."""
    times = []
    for _ in range(tries):
        begun = time.perf_counter()
        answer = server.get(
            address, "admin", headers={"accept": "application/json" if "/api/" in address else "text/html"}
        )
        times.append(time.perf_counter() - begun)
    return min(times), answer


def test_every_page_and_answer_comes_within_its_time(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Every address of the routes has status 200 within its time."""
    taken = {}
    for address in addresses(server):
        taken[address], answer = least(server, address)
        assert answer.status_code == 200, (address, answer.status_code, answer.text[:300])
    with capsys.disabled():
        worst = sorted(taken.items(), key=lambda item: -item[1])[:3]
        print("\n  " + ", ".join(f"{address} {seconds * 1000:.0f} ms" for address, seconds in worst), end=" ")
    assert len(taken) >= 20
    assert {address: seconds for address, seconds in taken.items() if seconds > PAGE_S} == {}


def test_the_overview_counts_all_that_there_is(server: Server) -> None:
    """The pieces of the overview have fifty rows and five thousand checkpoints in total."""
    rows, after = [], None
    while True:
        piece = server.get("/api/v1/runs", params={"limit": 7} | ({"after": after} if after else {})).json()
        rows += piece["rows"]
        if (after := piece["next"]) is None:
            break
    assert len({row["run"] for row in rows}) == len(rows) == RUNS
    assert sum(row["checkpoints"] for row in rows) == RUNS * CHECKPOINTS


def test_a_list_of_checkpoints_in_pieces_is_the_list(server: Server) -> None:
    """Pieces of any length list each checkpoint once, the newest first."""
    whole = server.get("/api/v1/runs/runs/run-007/checkpoints", params={"limit": 500}).json()
    assert whole["next"] is None and [row["step"] for row in whole["rows"]] == list(range(CHECKPOINTS * 100, 0, -100))
    rows, after = [], None
    while True:
        piece = server.get(
            "/api/v1/runs/runs/run-007/checkpoints", params={"limit": 33} | ({"after": after} if after else {})
        ).json()
        rows += piece["rows"]
        if (after := piece["next"]) is None:
            break
    assert rows == whole["rows"]


def test_the_first_view_does_not_wait_for_the_stores(
    root: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A server that has just begun answers at once, and has read everything later."""
    begun = time.perf_counter()
    app = create_app(ServerSettings([str(root)], tmp_path / "serve.sqlite"))
    made = time.perf_counter() - begun
    token = app.state.store.new_token("me", "admin")[1]
    with TestClient(app, base_url=HOST) as client:
        entered = time.perf_counter()
        answer = client.get("/", headers={"authorization": f"Bearer {token}", "accept": "text/html"})
        first = time.perf_counter() - entered
        assert answer.status_code == 200
        until = time.monotonic() + 120
        while app.state.readers[0].now.state != "ok" and time.monotonic() < until:
            time.sleep(0.05)
        known = time.perf_counter() - begun
        rows = client.get("/api/v1/runs", headers={"authorization": f"Bearer {token}"}).json()["rows"]
    with capsys.disabled():
        print(
            f"\n  application {made * 1000:.0f} ms, first view {first * 1000:.0f} ms, all known after {known:.1f} s",
            end=" ",
        )
    assert made + first < FIRST_S or first < FIRST_S / 2
    assert len(rows) == RUNS


def test_a_poll_without_news_is_short_and_what_is_new_is_seen(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A poll without news builds no run again, and notifies of nothing. After a save, only that run is built again."""
    notified: list[set[str]] = []
    (reader,) = open_readers([str(root)], lambda store, runs: notified.append(runs))
    reader.poll()
    before, times = reader.now.runs, []
    for _ in range(3):
        begun = time.perf_counter()
        reader.poll()
        times.append(time.perf_counter() - begun)
    with capsys.disabled():
        print(f"\n  a poll of {RUNS} runs without news {min(times) * 1000:.0f} ms", end=" ")
    assert all(reader.now.runs[name] is state for name, state in before.items()) and notified == [set(before)]
    assert min(times) < POLL_S, times
    Attempt.begin(open_bytes(str(root)), "run-011").save(request(99_900))
    reader.poll()
    assert notified[1:] == [{"run-011"}] and reader.now.runs["run-011"].history.live[-1].step == 99_900
