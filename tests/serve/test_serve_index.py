"""The index over real stores: it follows growing logs, and plans and executes actions."""

from __future__ import annotations

import shlex
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from tests.serve.made_server import Server, serving
from tests.serve.made_stores import make_run, make_store

from relight.catalog.run import Run
from relight.cli import cli
from relight.errors import StoreUnavailable
from relight.log import require_store
from relight.serve.index_rows import full_at
from relight.serve.reader import names_for, open_readers
from relight.store import open_bytes


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    """Yield a server over two runs of twelve checkpoints."""
    with serving([make_store(tmp_path / "runs", 2, 12)], tmp_path) as made:
        yield made


def wait_until(server: Server, path: str, wanted: object, of: str) -> None:
    """Wait up to five seconds until the field ``of`` of the answer has that value."""
    ends = time.monotonic() + 5
    while time.monotonic() < ends:
        if server.get(path).json().get(of) == wanted:
            return
        time.sleep(0.05)
    raise AssertionError(f"{path}: {of} is {server.get(path).json().get(of)!r}")


def test_a_page_of_a_list_continues_where_the_one_before_ended(server: Server) -> None:
    """Pieces of five list every checkpoint once, newest first."""
    seen, after = [], ""
    while after is not None:
        piece = server.get(f"/api/v1/runs/runs/run-000/checkpoints?limit=5{'&after=' + after if after else ''}").json()
        seen += [row["step"] for row in piece["rows"]]
        after = piece["next"]
    assert seen == [100 * number for number in range(12, 0, -1)]
    assert server.get("/api/v1/runs?limit=1").json()["total"] == 2
    assert server.get("/api/v1/runs?limit=0").status_code == 422


def test_what_is_new_in_a_store_is_there_soon(server: Server, tmp_path: Path) -> None:
    """A tag and a run that another process adds appear within the polling interval."""
    run = Run(open_bytes(str(tmp_path / "runs")), "run-000")
    run.tag("theirs", run.history().live[0].id)
    wait_until(server, "/api/v1/runs/runs/run-000", [["best-so-far", 1200], ["theirs", 100]], "tags")
    make_run(tmp_path / "runs", require_store(open_bytes(str(tmp_path / "runs"))).id, "newcomer", 2, 900)
    wait_until(server, "/api/v1/runs", 3, "total")
    shutil.rmtree(tmp_path / "runs" / "newcomer")
    wait_until(server, "/api/v1/runs", 2, "total")


def test_an_unchanged_run_is_not_computed_again(tmp_path: Path) -> None:
    """A poll of an unchanged store keeps the same values, and sends no notification."""
    notified = []
    (reader,) = open_readers(
        [str(make_store(tmp_path / "runs", 2, 3))], lambda store, runs: notified.append((store, runs))
    )
    reader.poll()
    before = reader.now.runs
    reader.poll()
    assert all(reader.now.runs[name] is state for name, state in before.items())
    assert notified == [("runs", {"run-000", "run-001"})]


def test_a_damaged_record_is_reported_and_hides_nothing_else(server: Server, tmp_path: Path) -> None:
    """The run with the damaged record is failed, with the record's number; the other run is unchanged."""
    record = tmp_path / "runs" / "run-000" / "log" / "000000000005.json"
    record.write_bytes(record.read_bytes()[:-9])
    server.app.state.readers[0]._logs.clear()
    make_run(tmp_path / "runs", require_store(open_bytes(str(tmp_path / "runs"))).id, "another", 1, 800)
    wait_until(server, "/api/v1/runs", 3, "total")
    run = Run(open_bytes(str(tmp_path / "runs")), "run-000")
    run.tag("x", run.history().live[0].id)
    ends = time.monotonic() + 5
    row: dict[str, object] = {}
    while row.get("health") != "failed" and time.monotonic() < ends:
        row = server.get("/api/v1/runs/runs/run-000").json()["row"]
    assert row["health"] == "failed" and "record 5" in str(row["why"])
    assert server.get("/api/v1/runs/runs/run-001").json()["row"]["health"] == "good"


def test_a_lost_store_keeps_what_was_read_and_reports_it(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """If a store is lost, the last read state of its runs is still shown."""

    def silent(_: object) -> list[str]:
        raise StoreUnavailable("no answer within 20 s")

    monkeypatch.setattr("relight.serve.reader.list_runs", silent)
    ends = time.monotonic() + 5
    row = {"state": "ok"}
    while row["state"] == "ok" and time.monotonic() < ends:  # a poll that began earlier may still succeed
        (row,) = server.get("/api/v1/stores").json()
    assert "no answer" in row["state"] and row["runs"] == 2
    assert "no answer" in server.get("/").text


def test_the_command_of_a_plan_does_the_same_at_a_terminal(server: Server, tmp_path: Path) -> None:
    """It names the store by its path, not by the server's short name, and a shell splits no name."""
    fields = {"store": "runs", "run": "run-000", "which": "500"}
    plans = [
        server.post(f"/api/v1/actions/{verb}", "operator", json={"fields": fields | given}).json()["command"]
        for verb, given in (("tag", {"name": "good"}), ("branch", {"to": "half; the rate"}))
    ]
    for command in plans:
        answer = CliRunner().invoke(cli, shlex.split(command)[1:])
        assert answer.exit_code == 0, (command, answer.output)
    runs = {row["run"]: row for row in server.get("/api/v1/runs").json()["rows"]}
    assert Run(open_bytes(str(tmp_path / "runs")), "run-000").history().tags["good"]
    assert Run(open_bytes(str(tmp_path / "runs")), "half; the rate").history().live, runs


def test_an_action_is_planned_then_done_then_written_down(server: Server) -> None:
    """A plan shows its command; the digest of another plan is refused. The executed action is in the store and in the audit log."""
    fields = {"store": "runs", "run": "run-000", "which": "500", "name": "good"}
    planned = server.post("/api/v1/actions/tag", "operator", json={"fields": fields}).json()
    assert planned["command"].startswith("relight tag ") and "/runs/run-000 good " in planned["command"]
    assert server.get("/api/v1/runs/runs/run-000").json()["tags"] == [["best-so-far", 1200]]
    refused = server.post(
        "/api/v1/actions/tag", "operator", json={"fields": fields | {"which": "600"}, "confirm": planned["digest"]}
    )
    assert refused.status_code == 409
    outcome = server.post(
        "/api/v1/actions/tag", "operator", json={"fields": fields, "confirm": planned["digest"]}
    ).json()
    assert outcome["ok"]
    wait_until(server, "/api/v1/runs/runs/run-000", [["best-so-far", 1200], ["good", 500]], "tags")
    rows = server.get("/api/v1/audit", "operator").json()["rows"]
    assert [(row["who"], row["what"], row["on"], row["how"]) for row in rows] == [
        ("operator", "tag", "runs/run-000@500", "ok"),
        ("operator", "tag", "runs/run-000@600", "refused"),
    ]


def test_a_hold_a_branch_and_a_promotion_are_what_the_commands_make(server: Server, tmp_path: Path) -> None:
    """Actions write the same records as the commands."""
    for verb, more in (
        ("hold", {"which": "200"}),
        ("branch", {"which": "300", "to": "fork"}),
        ("promote", {"which": "400", "stage": "staging"}),
    ):
        fields = {"store": "runs", "run": "run-000", **more}
        digest = server.post(f"/api/v1/actions/{verb}", "admin", json={"fields": fields}).json()["digest"]
        assert server.post(f"/api/v1/actions/{verb}", "admin", json={"fields": fields, "confirm": digest}).json()[
            "ok"
        ], verb
    wait_until(server, "/api/v1/runs", 3, "total")
    parents = {row["run"]: (row["parent"], row["at_step"]) for row in server.get("/api/v1/lineage/runs").json()["rows"]}
    assert parents == {"run-000": (None, None), "run-001": (None, None), "fork": ("run-000", 300)}
    history = Run(open_bytes(str(tmp_path / "runs")), "run-000").history()
    assert history.find(history.tags["staging"]).step == 400


def test_what_is_damaged_is_found_by_verify_and_reported(server: Server) -> None:
    """The synthetic checkpoints have no files: verify reports this, and the audit log records the failure."""
    fields = {"store": "runs", "run": "run-000", "which": "latest"}
    digest = server.post("/api/v1/actions/verify", "operator", json={"fields": fields}).json()["digest"]
    outcome = server.post("/api/v1/actions/verify", "operator", json={"fields": fields, "confirm": digest}).json()
    assert outcome["ok"] and outcome["task"], "it is a task: no request waits for it"
    ends = time.monotonic() + 20
    while (task := server.get(f"/api/v1/tasks/{outcome['task']}").json())[
        "state"
    ] == "running" and time.monotonic() < ends:
        time.sleep(0.05)
    assert task["state"] == "failed" and "missing" in task["details"]
    assert server.get("/api/v1/audit", "operator").json()["rows"][0]["how"] == "failed"


def test_stores_of_one_name_get_names_of_their_own() -> None:
    """Names of stores in addresses have no slashes, and are unique."""
    assert names_for(["/a/runs", "/b/runs", "s3://bucket/runs/", "/x/ö y"]) == ["runs", "runs-2", "runs-3", "y"]


def test_when_a_store_is_full_follows_from_its_pace() -> None:
    """At ten bytes an hour with forty free, a store is full in four hours. A store that does not grow is never full."""
    hour = 3600.0
    assert full_at([(0.0, 0.0), (10 * hour, 100.0)], 40, 10 * hour) == 14 * hour
    assert full_at([(0.0, 5.0), (hour, 5.0)], 40, hour) is None
    assert full_at([(0.0, 0.0), (hour, 5.0)], None, hour) is None
