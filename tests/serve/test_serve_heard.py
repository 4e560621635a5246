"""Pages show what processes on the server's machine report in events: phases of saves, predicted failures, firing alerts."""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from tests.monitoring.receivers import web_server
from tests.monitoring.watched import keep_events
from tests.scripts import Script
from tests.serve.made_server import serving
from tests.serve.made_stores import make_store
from torch import nn

import relight
from relight.catalog.run import Run
from relight.monitoring import RunSeen
from relight.monitoring.files import FileEvent, Head
from relight.monitoring.settings import Alerting
from relight.serve.curves import METRICS_MAX, POINTS_MAX, RUNS_MAX, Curves, CurveStore, merged_series
from relight.serve.event_feed import EventFeed
from relight.serve.followers_seen import FOLLOWERS_MAX, FollowersSeen
from relight.serve.reader import StoreState, open_readers
from relight.serve.values import FollowerRow
from relight.store import open_bytes
from relight.store.local import LocalStore

SPANS = [
    ("blocked", 10.0, 10.1),
    ("snapshot", 10.1, 10.4),
    ("write", 10.2, 11.0),
    ("parts", 11.0, 11.2),
    ("commit", 11.2, 11.5),
]


def until(read: Any, wanted: Any) -> None:
    """Wait until ``read`` returns ``wanted``, up to 20 s: a busy machine takes long to import the sender of alerts."""
    ends = time.monotonic() + 20
    while (value := read()) != wanted and time.monotonic() < ends:
        time.sleep(0.05)
    assert value == wanted


def test_saves_risk_and_alerts_come_from_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Events of a save and of a predicted failure are on the pages, and the failure fires an alert."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relight.toml").write_text("[alerts.rules.risk]\nabove = 0.5\n")
    root = make_store(tmp_path / "runs", 2, 3)
    url = str(root)
    newest = Run(open_bytes(url), "run-000").history().live[-1]
    spans = [
        {
            "event": "save.span",
            "id": newest.id,
            "step": newest.step,
            "span": part,
            "start": start,
            "end": end,
            "time": 1.0,
        }
        for part, start, end in SPANS
    ]
    alarm = {
        "event": "prediction.alarm",
        "kind": "memory",
        "detector": "forest",
        "score": 0.9,
        "message": "memory fills up",
        "time": time.time(),
    }
    keep_events(events, url, *spans, alarm, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: len(server.get("/api/v1/runs/runs/run-000").json()["saves"][0]["spans"]), len(SPANS))
        save = server.get("/api/v1/runs/runs/run-000").json()["saves"][0]
        assert save["seconds"] == pytest.approx(1.5)
        assert [(row["kind"], round(row["begin_s"], 6)) for row in save["spans"]][:2] == [
            ("blocked", 0.0),
            ("snapshot", 0.1),
        ]
        page = server.get("/runs/runs/run-000").text
        assert "1.5 s until durable" in page and 'class="span write"' in page
        until(lambda: [row["risk"] for row in server.get("/api/v1/risk").json()], [0.9])
        assert server.get("/api/v1/risk", role="scoped").json()[0]["store"] == "runs"
        rows = {row["run"]: row["risk"] for row in server.get("/api/v1/runs").json()["rows"]}
        assert rows == {"run-000": 0.9, "run-001": None}
        alerts = {row["name"]: row for row in server.get("/api/v1/settings", role="admin").json()["alerts"]}
        until(
            lambda: [
                row["name"] for row in server.get("/api/v1/settings", role="admin").json()["alerts"] if row["firing"]
            ],
            ["risk"],
        )
        assert len(alerts) > 5
        page = server.get("/settings", role="admin").text
        assert "firing" in page and "memory fills up" in page


def test_events_of_a_run_count_on_its_pages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run is idle, not late, once its process has ended. A checkpoint that was reported as damaged is not good."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    root = make_store(tmp_path / "runs", 2, 3)
    live = Run(open_bytes(str(root)), "run-000").history().live
    now = time.time()
    damaged = {
        "event": "verify.damaged",
        "id": live[0].id,
        "step": live[0].step,
        "kind": "corrupt_checkpoint",
        "file": "pack",
        "time": now,
    }
    keep_events(events, str(root), {"event": "attempt.ended", "run": "run-000", "time": now}, damaged, run="run-000")
    monkeypatch.setattr("relight.serve.reader.LATE_AFTER", -3.0)
    with serving([root], tmp_path) as server:
        until(
            lambda: [row["good"] for row in server.get("/api/v1/runs/runs/run-000/checkpoints").json()["rows"]],
            [True, True, False],
        )
        rows = {row["run"]: (row["health"], row["why"]) for row in server.get("/api/v1/runs").json()["rows"]}
        assert rows["run-000"] == ("idle", "the run has ended") and rows["run-001"][0] == "late"


def test_losses_between_saves_come_from_events(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Series have steps of events between those of checkpoints; checkpoints take precedence. Invalid events change nothing."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    root = make_store(tmp_path / "runs", 1, 3)
    events_written = [
        {
            "event": "steps.done",
            "steps": [120, 150, 200],
            "metrics": {"loss": [3.5, None, 99.0], "lr": [0.1, 0.1, 0.1]},
        },
        {"event": "steps.done", "steps": [130, "x"], "metrics": {"loss": [1.0, 1.0]}},
        {"event": "steps.done", "steps": [131], "metrics": {"loss": [10**400]}},
        {"event": "steps.done", "steps": [132, 133], "metrics": {"loss": [1.0], "x" * 81: [1.0, 2.0]}},
        {"event": "steps.done", "steps": 7, "metrics": []},
    ]
    keep_events(events, str(root), *events_written, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: sorted(server.get("/api/v1/runs/runs/run-000").json()["series"]), ["loss", "lr"])
        series = server.get("/api/v1/runs/runs/run-000").json()["series"]
        assert series["loss"] == [[100, 4.0], [120, 3.5], [131, None], [200, 2.0], [300, 4 / 3]]
        assert series["lr"] == [[120, 0.1], [150, 0.1], [200, 0.1]]
        assert "lr over steps 120 to 200" in server.get("/runs/runs/run-000").text


def test_every_reported_point_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ten thousand reported points of a metric are all in the answer, each with the time at which its step ended."""
    root, events = make_store(tmp_path / "runs", 1, 1), tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    now = time.time()
    lines = [
        {"event": "steps.done", "time": now - 1000 + block, "steps": list(range(begin, begin + 100)),
         "ages": [(99 - number) / 100 for number in range(100)], "metrics": {"reward": [float(begin)] * 100}}
        for block, begin in enumerate(range(0, 10_000, 100))
    ]  # fmt: skip
    keep_events(events, str(root), *lines, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: server.get("/api/v1/runs/runs/run-000/series?name=reward").json().get("total"), 10_000)
        series = server.get("/api/v1/runs/runs/run-000/series?name=reward").json()
        assert series["steps"] == list(range(10_000)) and len(series["values"]) == 10_000
        assert series["seconds"][150] == pytest.approx(now - 1000 + 1 - 0.49, abs=0.01)
        smooth = server.get("/api/v1/runs/runs/run-000/series?name=reward&smooth=50").json()["values"]
        assert smooth[0] == 0.0 and 9500 < smooth[-1] < 9900
        assert server.get("/api/v1/runs/runs/run-000/series?name=none").status_code == 404


def test_curves_are_kept_within_bounds() -> None:
    """A long series is downsampled, with its spike and its newest point. The least recently updated runs are dropped."""
    curves = CurveStore()
    for begin in range(0, 50_000, 500):
        steps = list(range(begin, begin + 500))
        values = [9.0 if step == 31_337 else 1.0 for step in steps]
        curves.add("s", "long", steps, [float(step) for step in steps], {f"m{number}": values for number in range(14)})
    points = curves.points("s", "long")
    assert len(points.values) == METRICS_MAX and len(points.times) <= 4 * POINTS_MAX
    for series in merged_series(Curves({}, {}), points).values():
        assert len(series.steps) == POINTS_MAX and series.steps[-1] == 49_999 and series.steps[0] == 0
        assert series.values[series.steps.index(31_337)] == 9.0
        assert list(series.seconds) == list(series.steps)
    for number in range(RUNS_MAX + 5):
        curves.add("s", f"run-{number}", [1], [1.0], {"loss": [1.0]})
    assert (
        len(curves) == RUNS_MAX and not curves.points("s", "long").values and not curves.points("s", "unknown").values
    )


def test_without_events_pages_work_and_report_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pages work on a machine without events."""
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    root = make_store(tmp_path / "runs", 1, 2)
    with serving([root], tmp_path) as server:
        run = server.get("/api/v1/runs/runs/run-000").json()
        assert run["row"]["risk"] is None and all(
            save["spans"] == [] and save["seconds"] is None for save in run["saves"]
        )
        assert server.get("/api/v1/risk").json() == []
        assert server.get("/runs/runs/run-000").status_code == 200


@pytest.mark.filterwarnings("ignore:'imghdr' is deprecated:DeprecationWarning")
def test_alerts_outlive_the_server_and_are_sent_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """After a restart of the server, an alert still fires, and no second notification is sent."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    monkeypatch.chdir(tmp_path)
    root = make_store(tmp_path / "runs", 1, 2)
    alarm = {
        "event": "prediction.alarm",
        "kind": "memory",
        "detector": "forest",
        "score": 0.9,
        "message": "memory fills up",
        "time": time.time(),
    }
    keep_events(events, str(root), alarm, run="run-000")

    def firing(server: Any) -> list[str]:
        return [
            rule["name"] for rule in server.get("/api/v1/settings", role="admin").json()["alerts"] if rule["firing"]
        ]

    with web_server() as (port, posts):
        (tmp_path / "relight.toml").write_text(
            f'[alerts]\nto = ["json://127.0.0.1:{port}/"]\ngroup_s = 0\n[alerts.rules.risk]\nabove = 0.5\n'
        )
        with serving([root], tmp_path) as server:
            until(lambda: (firing(server), len(posts)), (["risk"], 1))
            until(lambda: bool(server.app.state.store.alarms()), True)
            kept = server.app.state.store.alarms()
        with serving([root], tmp_path) as server:
            assert firing(server) == ["risk"], "before the first poll"
            until(lambda: server.app.state.store.alarms() != kept, True)
        assert len(posts) == 1


def test_each_record_of_a_log_is_read_once_for_pages_and_alerts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pages and alerts share one reader for each store, so each record is read once."""
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
        until(lambda: [run.run for run in around._runs()], ["run-000", "run-001"])
        assert [run.checkpoints for run in around._runs()] == [3, 3]
    assert read and {key: count for key, count in read.items() if count > 1} == {}


def test_a_store_that_is_not_read_yet_ends_no_alert_and_a_lost_one_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Earlier alerts wait for the first read of the store. If the store is lost, the last known runs stay, with the reason."""
    monkeypatch.setenv("RELIGHT_EVENTS", "0")
    (reader,) = open_readers([str(make_store(tmp_path / "runs", 2, 3))], lambda store, runs: None)
    around = EventFeed([reader], Alerting())
    began, seen = time.monotonic(), list[RunSeen]()
    poll = threading.Thread(target=lambda: seen.extend(around._watcher.poll(time.time())))
    poll.start()
    time.sleep(0.3)
    assert poll.is_alive() and seen == []
    reader.poll()
    poll.join(10)
    assert [(run.run, run.error) for run in seen] == [
        ("run-000", ""),
        ("run-001", ""),
    ] and time.monotonic() - began < 20
    for gone, reason in (
        (StoreState({}, "store_unavailable: away", None), "away"),
        (StoreState(reader.now.runs, "ok", 1.0), "has not answered"),
    ):
        reader.now = gone
        polled = around._watcher.poll(time.time())
        assert [run.run for run in polled] == ["run-000", "run-001"] and all(
            reason in run.error and run.checkpoints == 3 for run in polled
        )


FOLLOW = """
import os
import sys
import time

import torch
import relight

model = torch.nn.Linear(4, 1)
follower = relight.follow(sys.argv[1], model, strict=False, every=0.05)
print(follower.wait(30).step, flush=True)
while not os.path.exists(sys.argv[2]):
    time.sleep(0.05)
follower.close()
"""


def test_followers_are_on_the_runs_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that follows is listed with its step, lag and bytes, also for the JSON interface, until it is closed. It is no job."""
    events = tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    path = tmp_path / "runs" / "demo"
    model = nn.Linear(4, 1)
    with relight.Checkpointer(path, model=model, background=False) as ckpt:
        ckpt.restore()
        ckpt.save(7)
    shutil.rmtree(events)
    follower = Script(FOLLOW, str(path), str(tmp_path / "close"))
    assert follower.stdout.readline() == "7\n"
    with serving([tmp_path / "runs"], tmp_path) as server:

        def rows() -> list[dict[str, Any]]:
            rows: list[dict[str, Any]] = server.get("/api/v1/runs/runs/demo").json()["followers"]
            return rows

        until(
            lambda: [(row["step"], row["bytes"], row["source"], row["error"]) for row in rows()], [(7, 20, "store", "")]
        )
        assert rows()[0]["pid"] == follower.pid and 0 <= rows()[0]["lag_s"] < 100
        page = server.get("/runs/runs/demo").text
        assert "Followers" in page and f"process {follower.pid}, rank 0" in page
        (tmp_path / "close").touch()
        until(rows, [])
        assert follower.communicate(20) == ("", "")
        assert "Followers" not in server.get("/runs/runs/demo").text


def test_followers_are_bounded_and_show_their_error() -> None:
    """Of fields with other types nothing is shown, the oldest followers go, and a switch ends an error."""
    seen = FollowersSeen()

    def send(name: str, pid: int, **fields: Any) -> None:
        head = Head("s", "run", 0, "follower", pid, "host")
        assert seen.note(FileEvent(head, name, float(pid), fields)) == ("s", "run")

    send("follow.skipped", 1, why="the cable is out", run=3)
    send("follow.switched", 2, step="x", bytes=10**400, source=["no"], lag_s=None)
    assert seen.rows("s", "run") == [
        FollowerRow("host", 1, 0, error="the cable is out"),
        FollowerRow("host", 2, 0, time=2.0),
    ]
    send("follow.switched", 1, step=7, bytes=20, source="store", lag_s=0.5)
    send("follow.switched", 1, step=8, bytes=20, source="memory", lag_s=0.5)
    assert seen.rows("s", "run")[0] == FollowerRow("host", 1, 0, 8, 1.0, 0.5, 40, "memory")
    for pid in range(10, 10 + FOLLOWERS_MAX - 1):
        send("follow.switched", pid)
    assert [row.pid for row in seen.rows("s", "run")][:2] == [1, 10] and len(seen.rows("s", "run")) == FOLLOWERS_MAX
    send("follow.ended", 1)
    assert seen.rows("s", "run")[0].pid == 10 and seen.note(FileEvent(Head(), "save.durable", 0.0, {})) is None
