"""A save request in a run's log: one supervisor obeys it, once, and never after the request has expired."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
from tests.serve.made_server import serving
from tests.serve.made_stores import make_store
from tests.supervise.test_run import Job

from relight.catalog.run import Run
from relight.errors import ConfigError, StoreUnavailable
from relight.format.names import record_file
from relight.heartbeat import request_path, take_request, write_request
from relight.run_records.save_requests import (
    OLD_S,
    WHY_MAX,
    Answer,
    acknowledge,
    ask_for_save,
    describe_outcome,
    outcome_of,
    request_of,
    wait_for_answer,
)
from relight.save_reason import requested_by
from relight.store import ByteStore, open_bytes
from relight.store.base import Entry
from relight.supervise.save_requests import LogRequests


class Watching:
    """The part of a supervisor that obeys save requests, without a job."""

    def __init__(self, run: Run, mine: bool = True, cannot: str = "") -> None:
        self.obeyed: list[str] = []
        self.clock, self.now = 1000.0, time.time()
        self.requests = LogRequests(
            run.store,
            run.name,
            mine=lambda: mine,
            cannot=lambda: cannot,
            obey=self.obeyed.append,
            clock=lambda: self.clock,
            now=lambda: self.now,
        )
        self.requests.poll()

    def poll(self, later_s: float = 3.0) -> list[str]:
        """Poll ``later_s`` seconds later. Return all requests that were obeyed so far."""
        self.clock += later_s
        self.now += later_s
        self.requests.poll()
        return self.obeyed


@pytest.fixture
def run(tmp_path: Path) -> Run:
    """Make a run of two checkpoints."""
    return Run(open_bytes(str(make_store(tmp_path / "runs", 1, 2))), "run-000")


def test_a_request_is_obeyed_once_by_one_supervisor(run: Run) -> None:
    """Of two supervisors the first that polls obeys the request. The other, and a second poll, do nothing."""
    first, second = Watching(run), Watching(run)
    seq = ask_for_save(run.store, run.name, "anna", "before  lunch")
    assert outcome_of(run.history(), seq) == Answer()
    assert first.poll() == ["anna: before lunch"] and first.poll() == ["anna: before lunch"]
    assert acknowledge(run.store, run.name, request_of(run.view().records[seq]), "elsewhere") is False  # type: ignore[arg-type]
    assert [record.body.data["upto"] for record in run.history().notes[1:]] == [seq], "one answer"  # type: ignore[union-attr]
    assert outcome_of(run.history(), seq).acknowledged_by and not outcome_of(run.history(), seq).over
    assert second.obeyed == []


def test_what_was_asked_before_the_job_began_is_not_obeyed(run: Run) -> None:
    """A job that starts after a request does not obey it."""
    ask_for_save(run.store, run.name, "anna")
    later = Watching(run)
    assert later.poll() == []
    ask_for_save(run.store, run.name, "bert")
    ask_for_save(run.store, run.name, "carl")
    assert later.poll() == ["bert, carl"], "one save is for both"


def test_a_store_that_is_mounted_later_has_old_requests(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first poll lists nothing, since the store is not mounted yet. Requests from before the job are then as old as ever."""
    for age_s, obeyed in ((3600.0, []), (2.0, ["anna"])):
        ask_for_save(run.store, run.name, "anna")
        with monkeypatch.context() as unmounted:
            unmounted.setattr(type(run.store), "list", lambda self, prefix: iter(()))
            watching = Watching(run)
        watching.now += age_s
        assert watching.poll(0.0) == obeyed


def test_after_an_outage_only_requests_of_the_last_minute_are_obeyed(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A poll raises the store's errors, and the next poll begins at the same record."""
    for away_s, since_s, obeyed in ((600.0, OLD_S + 5, []), (600.0, OLD_S - 5, ["anna"])):
        watching = Watching(run)
        seq = ask_for_save(run.store, run.name, "anna")

        def silent(*_: object) -> bytes:
            raise StoreUnavailable("away", retryable=True)

        with monkeypatch.context() as away:
            away.setattr(type(run.store), "get", silent)
            with pytest.raises(StoreUnavailable):
                watching.poll()
        watching.now = time.time() + since_s - away_s
        assert watching.poll(away_s) == obeyed
        assert bool(outcome_of(run.history(), seq).acknowledged_by) is bool(obeyed)


def test_a_job_that_cannot_save_on_request_reports_it(run: Run) -> None:
    """The caller of a request that cannot be obeyed gets the reason at once."""
    watching = Watching(run, cannot="no rank takes SIGUSR1")
    seq = ask_for_save(run.store, run.name, "anna")
    assert watching.poll() == []
    answer = wait_for_answer(run.store, run.name, seq, 30.0)
    assert answer.over and "no rank takes SIGUSR1" in describe_outcome(answer, 1.0)


def test_a_damaged_record_does_not_hide_the_request_after_it(run: Run, tmp_path: Path) -> None:
    """A request after a damaged record is obeyed. Readers of the log report the damage."""
    watching = Watching(run)
    head = run.view().head
    (tmp_path / "runs" / run.name / "log" / f"{head + 1:012d}.json").write_bytes(b"{")
    ask_for_save(run.store, run.name, "anna")
    assert watching.poll() == ["anna"]


def test_a_request_that_a_listing_lacked_is_obeyed_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A listing has the record after a request, but not the request: a later poll obeys it. An expired one is not obeyed."""
    for late_s, obeyed in ((3.0, ["anna"]), (OLD_S + 5, [])):
        watching = Watching(run)
        head = run.view().head
        seq = ask_for_save(run.store, run.name, "anna")
        run.tag(f"after-{head}", run.history().live[-1].id)
        list_all = type(run.store).list

        def without_request(store: ByteStore, place: str, hidden: int = seq) -> Iterator[Entry]:
            return (entry for entry in list_all(store, place) if entry.name != record_file(hidden))

        with monkeypatch.context() as stale:
            stale.setattr(type(run.store), "list", without_request)
            assert watching.poll() == []
            for _ in range(int(late_s / 3.0)):
                watching.poll()
        assert watching.poll() == obeyed and watching.poll() == obeyed


def test_a_stray_file_does_not_hide_later_requests(run: Run, tmp_path: Path) -> None:
    """A file with a far higher number is not a record of the log. Requests below its number are obeyed."""
    log = tmp_path / "runs" / run.name / "log"
    before = Watching(run)
    (log / record_file(900)).write_bytes((log / record_file(0)).read_bytes())
    (log / record_file(5000)).parent.mkdir()
    (log / record_file(5000)).write_bytes((log / record_file(0)).read_bytes())
    assert before.poll() == []
    (log / record_file(900)).unlink()
    ask_for_save(run.store, run.name, "anna")
    assert before.poll() == ["anna"]
    after = Watching(run)
    ask_for_save(run.store, run.name, "bert")
    assert after.poll() == ["bert"]


@pytest.mark.parametrize("why", ["x" * (WHY_MAX + 1), "a\x1b[31m"])
def test_what_no_reason_can_be_is_refused_before_anything_is_written(run: Run, why: str) -> None:
    """An invalid reason is refused, because it would be stored in the checkpoint and shown on pages and terminals."""
    head = run.view().head
    with pytest.raises(ConfigError, match="reason"):
        ask_for_save(run.store, run.name, "anna", why)
    assert run.view().head == head


def test_the_requester_is_read_once_by_the_signalled_rank(tmp_path: Path) -> None:
    """A SIGUSR1 without a request has no author. The request file may have any content."""
    page = tmp_path / "heartbeat-0"
    anna = requested_by("anna")
    write_request(page, anna)
    assert (take_request(page), take_request(page)) == (anna, None)
    write_request(page, anna)
    write_request(page, None)
    assert take_request(page) is None and take_request("") is None
    for data in (
        b"\xff\x00a\n" * 5000,
        b"",
        msgspec.msgpack.encode({"kind": "x", "text": ""}),
        msgspec.msgpack.encode({"text": "a"}),
    ):
        request_path(page).write_bytes(data)
        assert take_request(page) is None
    for who in ("a\nb\x1b[0m", "é" * 5000, "\udcff"):
        write_request(page, requested_by(who))
        taken = take_request(page)
        assert taken is not None and taken.kind == "requested" and taken.text.isprintable() and len(taken.text) <= 500


@pytest.fixture(scope="module")
def training(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Start ``relight run`` with one process that never saves by itself."""
    job = Job(tmp_path_factory.mktemp("asked"), [], JOB_EVERY="100000", JOB_STEP_S="0.05")
    (job.path / "relight.toml").write_text("[supervise]\nspares = false\n")
    process = job.start("--nproc-per-node", "1", steps=100_000)
    try:
        ends = time.monotonic() + 60
        while time.monotonic() < ends and (not (job.path / "out").exists() or len(job.losses) < 3):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        time.sleep(4)  # it has polled once
        yield job
    finally:
        process.terminate()
        try:
            process.communicate(timeout=30)
        except subprocess.TimeoutExpired:
            process.kill()


def test_a_live_job_saves_as_the_command_asks(training: Job) -> None:
    """The command waits for the checkpoint.

    Its reason names the author and the purpose, and its step is not older than the request.
    """
    before = training.losses[-1][0]
    run_at = str(training.path / "store" / "run")
    command = [sys.executable, "-m", "relight", "save", run_at, "--why", "a test", "--json", "--timeout", "60"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)
    result = json.loads(done.stdout)
    assert done.returncode == 0 and result["ok"], done.stdout + done.stderr
    assert result["reason"].startswith("asked for by ") and result["reason"].endswith(": a test")
    assert result["step"] >= before and "requested in record" in done.stderr
    run = Run(open_bytes(training.path / "store"), "run")
    assert [checkpoint.id for checkpoint in run.history().live] == [result["id"]]


def test_a_live_job_saves_as_the_api_asks(training: Job, tmp_path: Path) -> None:
    """A save by the API is planned, confirmed and followed. The checkpoint's reason has the token's name."""
    with serving([training.path / "store"], tmp_path) as server:
        fields = {"store": "store", "run": "run"}
        digest = server.post("/api/v1/actions/save", "operator", json={"fields": fields}).json()["digest"]
        begun = server.post("/api/v1/actions/save", "operator", json={"fields": fields, "confirm": digest}).json()
        task = {"state": "running"}
        ends = time.monotonic() + 60
        while task["state"] == "running" and time.monotonic() < ends:
            time.sleep(0.1)
            task = server.get(f"/api/v1/tasks/{begun['task']}").json()
        newest = Run(open_bytes(training.path / "store"), "run").history().live[-1]
        assert task["state"] == "ok" and newest.body.reason == "asked for by operator" and newest.id in task["says"], (
            task
        )
