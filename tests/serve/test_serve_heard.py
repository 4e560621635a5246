"""What processes of the server's machine tell of runs is on its pages: how saves went, what looks like failing, which alerts hold."""

from __future__ import annotations

import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring.receivers import web_server
from tests.monitoring.watched import keep_events
from tests.serve.made_server import serving
from tests.serve.made_stores import make_store

from relight.catalog.run import Run
from relight.monitoring import RunSeen
from relight.monitoring.settings import Alerting
from relight.serve.event_feed import CURVES_MAX, METRICS_MAX, POINTS_MAX, EventFeed
from relight.serve.reader import StoreState, open_readers
from relight.store import open_bytes
from relight.store.local import LocalStore

SPANS = [("blocked", 10.0, 10.1), ("snapshot", 10.1, 10.4), ("write", 10.2, 11.0), ("parts", 11.0, 11.2), ("commit", 11.2, 11.5)]


def until(look: Any, wanted: Any) -> None:
    """It must come within so long as a busy machine takes to import what sends."""
    ends = time.monotonic() + 20
    while (found := look()) != wanted and time.monotonic() < ends:
        time.sleep(0.05)
    assert found == wanted


def test_saves_risk_and_alerts_come_from_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank and its agent have told of the newest save, and something of an alarm; a rule says that such a risk is worth an alert."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relight.toml").write_text("[alerts.rules.risk]\nabove = 0.5\n")
    root = make_store(tmp_path / "runs", 2, 3)
    url = str(root)
    newest = Run(open_bytes(url), "run-000").history().live[-1]
    told = [
        {"event": "save.span", "id": newest.id, "step": newest.step, "span": part, "start": start, "end": end, "time": 1.0}
        for part, start, end in SPANS
    ]
    alarm = {
        "event": "prediction.alarm",
        "kind": "memory",
        "detector": "drift",
        "score": 0.9,
        "say": "memory fills up",
        "time": time.time(),
    }
    keep_events(events, url, *told, alarm, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: len(server.get("/api/v1/runs/runs/run-000").json()["saves"][0]["spans"]), len(SPANS))
        save = server.get("/api/v1/runs/runs/run-000").json()["saves"][0]
        assert save["seconds"] == pytest.approx(1.5)
        assert [(one["kind"], round(one["begin_s"], 6)) for one in save["spans"]][:2] == [("blocked", 0.0), ("snapshot", 0.1)]
        page = server.get("/runs/runs/run-000").text
        assert "1.5 s until durable" in page and 'class="span write"' in page
        until(lambda: [one["risk"] for one in server.get("/api/v1/risk").json()], [0.9])
        assert server.get("/api/v1/risk", role="scoped").json()[0]["store"] == "runs"
        rows = {one["run"]: one["risk"] for one in server.get("/api/v1/runs").json()["rows"]}
        assert rows == {"run-000": 0.9, "run-001": None}
        alerts = {one["name"]: one for one in server.get("/api/v1/settings", role="admin").json()["alerts"]}
        until(lambda: [one["name"] for one in server.get("/api/v1/settings", role="admin").json()["alerts"] if one["firing"]], ["risk"])
        assert len(alerts) > 5
        page = server.get("/settings", role="admin").text
        assert "firing" in page and "memory fills up" in page


def test_what_was_told_of_a_run_counts_on_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run whose process has ended is idle, not late, however long ago its saves are; a checkpoint that was found damaged is not good."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    root = make_store(tmp_path / "runs", 2, 3)
    live = Run(open_bytes(str(root)), "run-000").history().live
    at = time.time()
    damaged = {"event": "verify.damaged", "id": live[0].id, "step": live[0].step, "kind": "corrupt_checkpoint", "file": "pack", "time": at}
    keep_events(events, str(root), {"event": "attempt.ended", "run": "run-000", "time": at}, damaged, run="run-000")
    monkeypatch.setattr("relight.serve.reader.LATE_AFTER", -3.0)
    with serving([root], tmp_path) as server:
        until(lambda: [one["good"] for one in server.get("/api/v1/runs/runs/run-000/checkpoints").json()["rows"]], [True, True, False])
        rows = {one["run"]: (one["health"], one["why"]) for one in server.get("/api/v1/runs").json()["rows"]}
        assert rows["run-000"] == ("idle", "the run has ended") and rows["run-001"][0] == "late"


def test_losses_between_saves_come_from_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps that were told lie between those of checkpoints, which count before them; what is no such event changes nothing."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    root = make_store(tmp_path / "runs", 1, 3)
    told = [
        {"event": "steps.done", "steps": [120, 150, 200], "metrics": {"loss": [3.5, None, 99.0], "lr": [0.1, 0.1, 0.1]}},
        {"event": "steps.done", "steps": [130, "x"], "metrics": {"loss": [1.0, 1.0]}},
        {"event": "steps.done", "steps": [131], "metrics": {"loss": [10**400]}},
        {"event": "steps.done", "steps": [132, 133], "metrics": {"loss": [1.0], "x" * 81: [1.0, 2.0]}},
        {"event": "steps.done", "steps": 7, "metrics": []},
    ]
    keep_events(events, str(root), *told, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: sorted(server.get("/api/v1/runs/runs/run-000").json()["series"]), ["loss", "lr"])
        series = server.get("/api/v1/runs/runs/run-000").json()["series"]
        assert series["loss"] == [[100, 4.0], [120, 3.5], [131, None], [150, None], [200, 2.0], [300, 4 / 3]]
        assert series["lr"] == [[120, 0.1], [150, 0.1], [200, 0.1]]
        assert "lr over steps 120 to 200" in server.get("/runs/runs/run-000").text


def test_curves_are_kept_within_bounds(tmp_path: Path) -> None:
    """Of long runs every other point goes, the newest stays; of many runs those that nobody told of for longest; of metrics the first."""
    around = EventFeed(
        open_readers([str(make_store(tmp_path / "runs", 1, 1))], lambda store, runs: None), Alerting(), events=tmp_path / "events"
    )
    (tmp_path / "events").mkdir(mode=0o700)
    for block in range(60):
        steps = list(range(100 * block, 100 * block + 100))
        metrics = {f"m{number}": [float(step) for step in steps] for number in range(20)}
        keep_events(tmp_path / "events", "s", {"event": "steps.done", "steps": steps, "metrics": metrics}, run="long")
    around._read_new()
    found = around.curves("s", "long")
    assert len(found) == METRICS_MAX and all(len(points) <= POINTS_MAX and max(points) >= 5998 and 0 in points for points in found.values())
    for number in range(CURVES_MAX + 5):
        told = {"event": "steps.done", "steps": [1], "metrics": {"loss": [1.0]}}
        keep_events(tmp_path / "events", "s", told, run=f"run-{number}", name=f"0000000000002-{number}-000001")
    for _ in range(5):
        around._read_new()
    assert len(around._curves) == CURVES_MAX and not around.curves("s", "long") and not around.curves("s", "nobody")


def test_without_events_pages_say_so_and_nothing_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A server on a machine that trains nothing."""
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    root = make_store(tmp_path / "runs", 1, 2)
    with serving([root], tmp_path) as server:
        told = server.get("/api/v1/runs/runs/run-000").json()
        assert told["row"]["risk"] is None and all(one["spans"] == [] and one["seconds"] is None for one in told["saves"])
        assert server.get("/api/v1/risk").json() == []
        assert server.get("/runs/runs/run-000").status_code == 200


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_alerts_outlive_the_server_and_are_told_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is ended and started anew: what fires does so since before, and nobody is told again."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    monkeypatch.chdir(tmp_path)
    root = make_store(tmp_path / "runs", 1, 2)
    alarm = {
        "event": "prediction.alarm",
        "kind": "memory",
        "detector": "drift",
        "score": 0.9,
        "say": "memory fills up",
        "time": time.time(),
    }
    keep_events(events, str(root), alarm, run="run-000")

    def firing(server: Any) -> list[str]:
        return [one["name"] for one in server.get("/api/v1/settings", role="admin").json()["alerts"] if one["firing"]]

    with web_server() as (port, posts):
        (tmp_path / "relight.toml").write_text(
            f'[alerts]\nto = ["json://127.0.0.1:{port}/"]\ngroup_s = 0\n[alerts.rules.risk]\nabove = 0.5\n'
        )
        with serving([root], tmp_path) as server:
            until(lambda: (firing(server), len(posts)), (["risk"], 1))
            until(lambda: bool(server.app.state.store.alarms()), True)
            kept = server.app.state.store.alarms()
        with serving([root], tmp_path) as server:
            assert firing(server) == ["risk"], "before it has looked"
            until(lambda: server.app.state.store.alarms() != kept, True)
        assert len(posts) == 1


def test_each_record_of_a_log_is_read_once_for_pages_and_alerts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages and alerts know the same: one reader a store, for both."""
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    root = make_store(tmp_path / "runs", 2, 3)
    read: Counter[str] = Counter()
    plain = LocalStore.get

    def counted(self: LocalStore, key: str, *rest: Any, **more: Any) -> bytes:
        read[key] += "/log/" in key and "runs" in self.url
        return plain(self, key, *rest, **more)

    monkeypatch.setattr(LocalStore, "get", counted)
    with serving([root], tmp_path) as server:
        around = server.app.state.index._around
        until(lambda: [one.run for one in around._runs()], ["run-000", "run-001"])
        assert [one.checkpoints for one in around._runs()] == [3, 3]
    assert read and {key: count for key, count in read.items() if count > 1} == {}


def test_a_store_that_is_not_read_yet_ends_no_alert_and_one_that_hangs_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Alerts of before wait for the first look; when a store has gone, what was known of its runs stays, and says why."""
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    (reader,) = open_readers([str(make_store(tmp_path / "runs", 2, 3))], lambda store, runs: None)
    around = EventFeed([reader], Alerting())
    began, seen = time.monotonic(), list[RunSeen]()
    looking = threading.Thread(target=lambda: seen.extend(around._watcher.poll(time.time())))
    looking.start()
    time.sleep(0.3)
    assert looking.is_alive() and seen == []
    reader.poll()
    looking.join(10)
    assert [(one.run, one.error) for one in seen] == [("run-000", ""), ("run-001", "")] and time.monotonic() - began < 20
    for gone, says in (
        (StoreState({}, "store_unavailable: away", None), "away"),
        (StoreState(reader.now.runs, "ok", 1.0), "has not answered"),
    ):
        reader.now = gone
        found = around._watcher.poll(time.time())
        assert [one.run for one in found] == ["run-000", "run-001"] and all(says in one.error and one.checkpoints == 3 for one in found)
