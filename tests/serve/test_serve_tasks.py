"""Tasks that a page or the API starts: requests for saves, drills of a copy. They report progress, and end with the server."""

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

from relight.catalog.run import Run
from relight.commit import Attempt
from relight.errors import CheckpointNotFound, ConfigError, StoreUnavailable
from relight.log.identity import now_text
from relight.run_records.incident_sync import DIRECTORY
from relight.serve.actions import newest_account_time
from relight.serve.pages_actions import ActionOutcome
from relight.serve.scope import asking
from relight.serve.tasks import FAILED, LINES_MAX, OK, RUNNING, RUNNING_MAX, ServerTask, Tasks
from relight.store import open_bytes
from relight.supervise.goodput import Account
from relight.supervise.save_requests import LogRequests


def over(server: Server, id_: str, within_s: float = 60.0) -> dict[str, Any]:
    """Wait for the end of a task, and return it as the API shows it."""
    ends = time.monotonic() + within_s
    while time.monotonic() < ends:
        task: dict[str, Any] = server.get(f"/api/v1/tasks/{id_}").json()
        if task["state"] != "running":
            return task
        time.sleep(0.1)
    raise AssertionError(task)


def act(server: Server, verb: str, run: str = "demo", role: str = "operator", pause_s: float = 0.0) -> dict[str, Any]:
    """Plan an action, execute it ``pause_s`` seconds later, and return the answer."""
    fields = {"store": "runs", "run": run}
    digest = server.post(f"/api/v1/actions/{verb}", role, json={"fields": fields}).json()["digest"]
    time.sleep(pause_s)
    outcome: dict[str, Any] = server.post(
        f"/api/v1/actions/{verb}", role, json={"fields": fields, "confirm": digest}
    ).json()
    return outcome


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server over real checkpoints: four of ``demo``, one of ``baseline``."""
    fill(tmp_path / "runs")
    with serving([tmp_path / "runs"], tmp_path) as made:
        yield made


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Run]:
    """Yield the run ``live`` of a job that saves on request, as under ``relight run``."""
    store = open_bytes(tmp_path / "runs")
    attempt = Attempt.begin(store, "live")
    attempt.save(request(1))
    requests = LogRequests(
        store,
        "live",
        mine=lambda: True,
        cannot=lambda: "",
        poll_s=0.2,
        obey=lambda who: attempt.save(request(2, reason=f"asked for by {who}")) and None,
    )
    requests.start()
    yield Run(store, "live")
    requests.close()


def test_a_save_that_the_api_asks_for_is_made_and_reported(job: Run, server: Server) -> None:
    """The plan shows whether a supervisor is there, the task names the checkpoint, and the audit log has the user and the outcome."""
    plan = server.post("/api/v1/actions/save", "operator", json={"fields": {"store": "runs", "run": "live"}}).json()
    assert "No relight run has recorded anything" in plan["says"] and plan["command"].endswith("/runs/live")
    account = Account("job", now_text(), 0.5, {}, {}, {}, 1, 0)
    job.store.put_once(f"live/{DIRECTORY}/1.000001.account.json", msgspec.json.encode(account))
    ends = time.monotonic() + 10
    while "relight run recorded its goodput" not in plan["says"] and time.monotonic() < ends:
        plan = server.post("/api/v1/actions/save", "operator", json={"fields": {"store": "runs", "run": "live"}}).json()
    assert re.search(r"(just now|s ago): it checks for requests every 3 s", plan["says"])
    done = act(server, "save", "live", pause_s=1.1)  # the text of the plan has seconds, which do not change its digest
    task = over(server, done["task"])
    newest = job.history().live[-1]
    assert task["state"] == OK and newest.id in task["says"] and newest.body.reason == "asked for by operator", task
    assert task["who"] == "operator" and task["lines"]
    (row,) = server.get("/api/v1/audit", "operator").json()["rows"]
    assert (row["who"], row["what"], row["on"], row["how"]) == ("operator", "save", "runs/live", "ok")


def test_a_save_without_a_supervisor_fails_with_a_hint(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without ``relight run``, the task fails in time with a hint, and the audit log has the failure."""
    monkeypatch.setattr("relight.run_records.save_requests.UNACKNOWLEDGED_S", 0.5)
    task = over(server, act(server, "save")["task"])
    assert task["state"] == FAILED and "not acknowledged within" in task["says"] and "USR1" in task["says"]
    assert server.get("/api/v1/audit", "operator").json()["rows"][0]["how"] == "failed"


def test_a_refused_save_requests_nothing(job: Run, server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If too many tasks run, or the request is invalid, *Save now* is refused and the job does not save."""
    go, tasks = threading.Event(), server.app.state.tasks
    for number in range(RUNNING_MAX):
        tasks.begin("drill", "runs", f"run-{number}", "anna", lambda task: ActionOutcome(go.wait(60), ""))
    before = job.view().head
    assert "tasks are already running" in str(act(server, "save", "live"))
    assert job.view().head == before
    go.set()
    ends = time.monotonic() + 20
    while any(task.state == RUNNING for task in tasks.all()) and time.monotonic() < ends:
        time.sleep(0.01)
    monkeypatch.setattr("relight.run_records.save_requests.WHO_MAX", 1)
    assert "a name has at most 1 letters" in str(act(server, "save", "live"))
    while any(task.state == RUNNING for task in tasks.all()) and time.monotonic() < ends:
        time.sleep(0.01)
    assert [task.state for task in tasks.all() if task.verb == "save"] == [FAILED]
    time.sleep(0.5)  # the job polls every 0.2 s
    assert job.view().head == before


def test_a_drill_from_a_page_is_confirmed_shown_and_remembered(server: Server, tmp_path: Path) -> None:
    """In a browser without scripts, the first POST shows the plan and the second starts the drill; its page shows the result.

    The run is unchanged.
    """
    before = {path: path.read_bytes() for path in (tmp_path / "runs" / "demo").rglob("*") if path.is_file()}
    fields = {"store": "runs", "run": "demo"}
    page = server.post("/act/drill", "operator", data=fields)
    assert f"relight drill --copy {tmp_path}/runs/demo" in page.text and "on the job&#39;s machine" in page.text
    go = re.search(r'name="go" value="([0-9a-f]+)"', page.text)
    assert go is not None
    begun = server.post("/act/drill", "operator", data=fields | {"go": go[1]})
    assert begun.status_code == 303 and begun.headers["location"].startswith("/tasks/")
    id_ = begun.headers["location"].rpartition("/")[2]
    assert "running" in server.get(f"/tasks/{id_}").text
    assert act(server, "drill")["task"] == id_, "one drill of a run at a time"
    task = over(server, id_)
    assert task["state"] == OK and "7 passed" in task["says"], task
    shown = server.get(f"/tasks/{id_}").text
    assert "prune: passed" in shown and "a restore skipped it" in shown
    after = {
        path: path.read_bytes()
        for path in (tmp_path / "runs" / "demo").rglob("*")
        if path.is_file() and path.parent.name != "drills"
    }
    assert after == before and len(list((tmp_path / "runs" / "demo" / "drills").iterdir())) == 1


def test_a_drill_ends_with_the_server(server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """When the server ends, a running drill ends, and its copies are removed."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    id_ = act(server, "drill")["task"]
    ends = time.monotonic() + 20
    while not list(tmp_path.glob("relight-drill-*")) and time.monotonic() < ends:
        time.sleep(0.01)
    server.app.state.tasks.close()
    task = server.app.state.tasks.get(id_)
    assert task.done is not None and "aborted" in task.done.says
    assert not list(tmp_path.glob("relight-drill-*"))


@pytest.mark.parametrize("address", ["/tasks/", "/api/v1/tasks/"])
def test_a_task_of_a_run_that_one_may_not_see_is_not_there(server: Server, address: str) -> None:
    """A task outside the caller's scope is absent from lists, and its address is 404, as for an unknown task."""
    task = server.app.state.tasks.begin("drill", "runs", "demo", "anna", lambda task: ActionOutcome(True, "fine"))
    assert server.get(f"{address}{task.id}").status_code == 200
    assert server.get(f"{address}{task.id}", "scoped").status_code == 404
    assert server.get(f"{address}0123456789abcdef").status_code == 404
    assert server.get("/api/v1/tasks", "scoped").json() == []
    assert [row["id"] for row in server.get("/api/v1/tasks").json()] == [task.id]


def test_tasks_are_bounded_and_errors_are_how_they_end() -> None:
    """Running tasks and kept lines are limited. A ``RelightError`` is a task's result, and is passed to each callback."""
    tasks, go, outcomes = Tasks(), threading.Event(), list[ActionOutcome]()

    def waits(task: ServerTask) -> ActionOutcome:
        for number in range(3 * LINES_MAX):
            task.add_line(f"line {number}")
        go.wait(10)
        raise ConfigError("it cannot be")

    begun = [tasks.begin("drill", "runs", f"run-{number}", "anna", waits) for number in range(RUNNING_MAX)]
    with pytest.raises(StoreUnavailable, match="already running"):
        tasks.begin("drill", "runs", "one-more", "anna", waits)
    begun[0].when_over(outcomes.append)
    go.set()
    ends = time.monotonic() + 10
    while not outcomes and time.monotonic() < ends:
        time.sleep(0.01)
    assert outcomes == [ActionOutcome(False, "it cannot be", "it cannot be")] and begun[0].state == FAILED
    assert len(begun[0].lines) == LINES_MAX and begun[0].lines[-1] == f"line {3 * LINES_MAX - 1}"
    begun[0].when_over(outcomes.append)
    assert len(outcomes) == 2, "a callback that is added after the end is called at once"
    with asking("other"), pytest.raises(CheckpointNotFound):
        tasks.get(begun[0].id)
    tasks.close()


def test_whether_a_supervisor_runs_is_known_from_the_last_account() -> None:
    """Start and duration of the newest account give the time of the last record."""
    first = Account("job", "2026-01-01T00:00:00Z", 90.0, {}, {}, {}, 1, 0)
    later = Account("job", "2026-01-01T00:01:00Z", 60.0, {}, {}, {}, 1, 0)
    assert newest_account_time([]) is None
    assert newest_account_time([first]) == 1767225690.0
    assert newest_account_time([first, later]) == 1767225720.0


def test_every_callback_of_a_task_is_called() -> None:
    """Every callback of a task is called, also after another one raised an error."""
    tasks, go, notified = Tasks(), threading.Event(), list[str]()
    task = tasks.begin("drill", "runs", "run-000", "anna", lambda task: ActionOutcome(go.wait(10), ""))

    def fails(done: ActionOutcome) -> None:
        raise StoreUnavailable("the audit store is away")

    for callback in (lambda done: notified.append("first"), fails, lambda done: notified.append("second")):
        task.when_over(callback)
    go.set()
    ends = time.monotonic() + 10
    while len(notified) < 2 and time.monotonic() < ends:
        time.sleep(0.01)
    assert notified == ["first", "second"]
    tasks.close()


def test_each_audit_entry_of_one_task_ends(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If two users verify the same checkpoint at the same time, both audit entries get the outcome."""
    go = threading.Event()
    monkeypatch.setattr(
        "relight.serve.actions.verify",
        lambda task, run, checkpoint, verified: ActionOutcome(not go.wait(10), "damaged: 3 findings"),
    )
    ids = [act(server, "verify", role=role)["task"] for role in ("admin", "operator")]
    assert ids[0] == ids[1]
    go.set()
    over(server, ids[0])
    ends = time.monotonic() + 10
    while [entry.how for entry in server.app.state.book.entries()] != ["failed"] * 2 and time.monotonic() < ends:
        time.sleep(0.02)
    assert [(entry.who, entry.how, entry.says) for entry in server.app.state.book.entries()] == [
        (role, "failed", "damaged: 3 findings") for role in ("admin", "operator")
    ]
