"""What a page or the API begins and goes on behind it: asking a job for a save, drilling a copy. Told as it goes, ended with the server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tests.cli.at_hand import fill, request
from tests.serve.made_server import Server, serving

from relight.catalog.incident_sync import DIRECTORY
from relight.catalog.run import Run
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.log.identity import now_text
from relight.serve.actions import newest_account_time
from relight.serve.pages_actions import ActionOutcome
from relight.serve.scope import asking
from relight.serve.tasks import FAILED, LINES_MAX, OK, RUNNING_MAX, ServerTask, Tasks
from relight.store import open_bytes
from relight.supervise.goodput import Account
from relight.supervise.requests import Requests


def over(server: Server, id_: str, within_s: float = 60.0) -> dict[str, Any]:
    """How a task ended."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        told: dict[str, Any] = server.get(f"/api/v1/tasks/{id_}").json()
        if told["state"] != "running":
            return told
        time.sleep(0.1)
    raise AssertionError(told)


def act(server: Server, verb: str, run: str = "demo", role: str = "operator", pause_s: float = 0.0) -> dict[str, Any]:
    """Plan it, then do it, some time later: what was answered."""
    fields = {"store": "runs", "run": run}
    digest = server.post(f"/api/v1/actions/{verb}", role, json={"fields": fields}).json()["digest"]
    time.sleep(pause_s)
    done: dict[str, Any] = server.post(f"/api/v1/actions/{verb}", role, json={"fields": fields, "confirm": digest}).json()
    return done


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Over real checkpoints: four of ``demo``, one of ``baseline``."""
    fill(tmp_path / "runs")
    with serving([tmp_path / "runs"], tmp_path) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Run]:
    """A job of a run ``live`` that saves when it is asked, as ``relight run`` has it."""
    store = open_bytes(tmp_path / "runs")
    attempt = Attempt.begin(store, "live")
    attempt.save(request(1))
    requests = Requests(
        store, "live", mine=lambda: True, cannot=lambda: "", look_s=0.2,
        obey=lambda who: attempt.save(request(2, reason=f"asked for by {who}")) and None,
    )  # fmt: skip
    requests.start()
    yield Run(store, "live")
    requests.close()


def test_a_save_that_the_api_asks_for_is_made_and_told(job: Run, server: Server) -> None:
    """The plan says whether anybody listens; the task, which checkpoint it is; the audit log, who asked and how it ended."""
    plan = server.post("/api/v1/actions/save", "operator", json={"fields": {"store": "runs", "run": "live"}}).json()
    assert "No relight run has recorded anything" in plan["says"] and plan["command"] == "relight save runs/live"
    account = Account("job", now_text(), 0.5, {}, {}, {}, 1, 0)
    job.store.put_once(f"live/{DIRECTORY}/1.000001.account.json", msgspec.json.encode(account))
    ends = time.monotonic() + 10
    while "relight run recorded its goodput" not in plan["says"] and time.monotonic() < ends:
        plan = server.post("/api/v1/actions/save", "operator", json={"fields": {"store": "runs", "run": "live"}}).json()
    assert "s ago: it checks for requests every 3 s" in plan["says"]
    done = act(server, "save", "live", pause_s=1.1)  # what is shown tells seconds, which is no other plan
    told = over(server, done["task"])
    newest = job.history().live[-1]
    assert told["state"] == OK and newest.id in told["says"] and newest.body.reason == "asked for by operator", told
    assert told["who"] == "operator" and told["lines"]
    (row,) = server.get("/api/v1/audit", "operator").json()["rows"]
    assert (row["who"], row["what"], row["on"], row["how"]) == ("operator", "save", "runs/live", "ok")


def test_a_save_that_nobody_hears_ends_and_says_what_to_do(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """A job without relight run: the page does not wait for ever, and the request stands in the log."""
    monkeypatch.setattr("relight.catalog.save_requests.NOBODY_S", 0.5)
    told = over(server, act(server, "save")["task"])
    assert told["state"] == FAILED and "not acknowledged within" in told["says"] and "USR1" in told["says"]
    assert server.get("/api/v1/audit", "operator").json()["rows"][0]["how"] == "failed"


def test_a_drill_from_a_page_is_confirmed_shown_and_remembered(server: Server, tmp_path: Path) -> None:
    """By a browser without scripts: the form asks, the second post begins it, its page tells how it ended; the run is as it was."""
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / "demo").rglob("*") if path.is_file()}
    fields = {"store": "runs", "run": "demo"}
    page = server.post("/act/drill", "operator", data=fields)
    assert "relight drill --copy runs/demo" in page.text and "on the job&#39;s machine" in page.text
    go = re.search(r'name="go" value="([0-9a-f]+)"', page.text)
    assert go is not None
    begun = server.post("/act/drill", "operator", data=fields | {"go": go[1]})
    assert begun.status_code == 303 and begun.headers["location"].startswith("/tasks/")
    id_ = begun.headers["location"].rpartition("/")[2]
    assert "running" in server.get(f"/tasks/{id_}").text
    assert act(server, "drill")["task"] == id_, "one drill of a run at a time"
    told = over(server, id_)
    assert told["state"] == OK and "7 passed" in told["says"], told
    shown = server.get(f"/tasks/{id_}").text
    assert "prune: passed" in shown and "a restore passed it over" in shown
    after = {path: path.read_bytes() for path in (tmp_path / "runs" / "demo").rglob("*") if path.is_file() and path.parent.name != "drills"}
    assert after == before and len(list((tmp_path / "runs" / "demo" / "drills").iterdir())) == 1


def test_a_drill_ends_with_the_server(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What it had started is gone, and so are its copies."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    id_ = act(server, "drill")["task"]
    ends = time.monotonic() + 20
    while not list(tmp_path.glob("relight-drill-*")) and time.monotonic() < ends:
        time.sleep(0.01)
    server.app.state.tasks.close()
    told = server.app.state.tasks.get(id_)
    assert told.done is not None and "broken off" in told.done.says
    assert not list(tmp_path.glob("relight-drill-*"))


@pytest.mark.parametrize("address", ["/tasks/", "/api/v1/tasks/"])
def test_a_task_of_a_run_that_one_may_not_see_is_not_there(server: Server, address: str) -> None:
    """By its address, in the list; nor is one that there never was."""
    task = server.app.state.tasks.begin("drill", "runs", "demo", "anna", lambda task: ActionOutcome(True, "fine"))
    assert server.get(f"{address}{task.id}").status_code == 200
    assert server.get(f"{address}{task.id}", "scoped").status_code == 404
    assert server.get(f"{address}0123456789abcdef").status_code == 404
    assert server.get("/api/v1/tasks", "scoped").json() == []
    assert [one["id"] for one in server.get("/api/v1/tasks").json()] == [task.id]


def test_tasks_are_bounded_and_errors_are_how_they_end() -> None:
    """So many at once; of what they say the last lines; a task that fails in a way of ours says so, and is told to who waits for it."""
    tasks, go, heard = Tasks(), threading.Event(), list[ActionOutcome]()

    def waits(task: ServerTask) -> ActionOutcome:
        for number in range(3 * LINES_MAX):
            task.add_line(f"line {number}")
        go.wait(10)
        raise ConfigError("it cannot be")

    begun = [tasks.begin("drill", "runs", f"run-{number}", "anna", waits) for number in range(RUNNING_MAX)]
    with pytest.raises(StoreUnavailable, match="under way already"):
        tasks.begin("drill", "runs", "one-more", "anna", waits)
    begun[0].when_over(heard.append)
    go.set()
    ends = time.monotonic() + 10
    while not heard and time.monotonic() < ends:
        time.sleep(0.01)
    assert heard == [ActionOutcome(False, "it cannot be", "it cannot be")] and begun[0].state == FAILED
    assert len(begun[0].lines) == LINES_MAX and begun[0].lines[-1] == f"line {3 * LINES_MAX - 1}"
    begun[0].when_over(heard.append)
    assert len(heard) == 2, "who asks late hears it at once"
    with asking("other"), pytest.raises(CheckpointNotFound):
        tasks.get(begun[0].id)
    tasks.close()


def test_whether_somebody_watches_is_known_from_the_last_account() -> None:
    """A job's account says when it began and how long it has gone on: together, when it was written."""
    one = Account("job", "2026-01-01T00:00:00Z", 90.0, {}, {}, {}, 1, 0)
    later = Account("job", "2026-01-01T00:01:00Z", 60.0, {}, {}, {}, 1, 0)
    assert newest_account_time([]) is None
    assert newest_account_time([one]) == 1767225690.0
    assert newest_account_time([one, later]) == 1767225720.0


def test_every_asker_of_a_task_hears_its_end() -> None:
    """A second asker of the same task does not take the first one's place, nor does one whose entry cannot be written."""
    tasks, go, heard = Tasks(), threading.Event(), list[str]()
    task = tasks.begin("drill", "runs", "run-000", "anna", lambda task: ActionOutcome(go.wait(10), ""))

    def fails(done: ActionOutcome) -> None:
        raise StoreUnavailable("the audit store is away")

    for one in (lambda done: heard.append("first"), fails, lambda done: heard.append("second")):
        task.when_over(one)
    go.set()
    ends = time.monotonic() + 10
    while len(heard) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    assert heard == ["first", "second"]
    tasks.close()


def test_each_audit_entry_of_one_task_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two operators verify the same checkpoint at the same time: both entries have how it ended."""
    go = threading.Event()
    monkeypatch.setattr(
        "relight.serve.actions.verify", lambda task, run, one, verified: ActionOutcome(not go.wait(10), "damaged: 3 findings")
    )
    ids = [act(server, "verify", role=role)["task"] for role in ("admin", "operator")]
    assert ids[0] == ids[1]
    go.set()
    over(server, ids[0])
    ends = time.monotonic() + 10
    while [one.how for one in server.app.state.book.entries()] != ["failed"] * 2 and time.monotonic() < ends:
        time.sleep(0.02)
    assert [(one.who, one.how, one.says) for one in server.app.state.book.entries()] == [
        (role, "failed", "damaged: 3 findings") for role in ("admin", "operator")
    ]
