"""The table of runs: state of each job, metrics, configuration, search and sorting; and damage on every page that names a checkpoint."""

from __future__ import annotations

import shutil
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.monitoring.watched import keep_events
from tests.serve.made_server import Server, serving
from tests.serve.made_stores import make_store

import relight
from relight.format.records import FenceBody, Record
from relight.log import History, LogView
from relight.log.identity import seconds_since_epoch
from relight.serve.job_states import job_state
from relight.serve.pages_incident import ended, traceback_of
from relight.serve.reader import RunState
from relight.supervise.incidents import Incident

NOW = seconds_since_epoch("2026-01-01T12:00:00Z") or 0.0


def at(seconds: float) -> str:
    """Return the time ``seconds`` before ``NOW``, as records have it."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(NOW - seconds))


def attempt(seconds: float) -> Record:
    """Return the record of an attempt that began ``seconds`` ago."""
    body = FenceBody(attempt="a", reason="made")
    return Record(seq=1, prev="", store="s", run="r", epoch=1, time=at(seconds), writer="w", body=body)


def failure(seconds: float, action: str) -> Incident:
    """Return an incident of ``seconds`` ago."""
    return Incident(
        id=f"{int((NOW - seconds) * 1000)}-abcdef", at=at(seconds), host="h", job="j", life=1, kind="killed", why="rank 0 was killed", rank=0, step=5,
        durable=5, words="", action=action, reason="", delay_s=0.0, settings={}, clues=[], workers=[],
    )  # fmt: skip


@pytest.mark.parametrize(
    ("attempt_s", "incident", "ended_normally", "event_s", "step_s", "word"),
    [
        (None, None, False, None, None, "idle"),
        (30, None, False, None, None, "starting"),
        (300, None, False, 5, 4, "running"),
        (300, None, True, 5, 4, "finished"),
        (9000, None, False, 5000, 5000, "idle"),
        (9000, (60, "resume"), False, 70, 70, "starting"),
        (9000, (4000, "resume"), False, 4100, 4100, "failed"),
        (9000, (60, "stop"), False, 70, 70, "given up"),
        (9000, (60, "end"), False, 70, 70, "idle"),
        (30, (60, "stop"), False, 5, 5, "running"),
    ],
)
def test_states_of_a_job(
    attempt_s: float | None,
    incident: tuple[float, str] | None,
    ended_normally: bool,
    event_s: float | None,
    step_s: float | None,
    word: str,
) -> None:
    """The state follows from the last attempt, failure, event and step. A new attempt after a stop is a new job."""
    state = RunState(
        "r",
        LogView("r", "", "", (), (), -1, ""),
        History(fences=[attempt(attempt_s)] if attempt_s is not None else []),
        recorded_incidents=[failure(*incident)] if incident is not None else [],
    )
    times = [NOW - seconds if seconds is not None else None for seconds in (event_s, step_s)]
    ended_at = NOW if ended_normally else None
    assert job_state(state, ended_at, *times, NOW).word == word


def test_a_job_that_moved_to_another_machine_is_not_shown_as_finished() -> None:
    """It ended normally here. The log has a later attempt, of another machine. Its events are not here."""
    log = LogView("r", "", "", (), (), -1, "")
    state = RunState("r", log, History(fences=[attempt(300), attempt(30)]))
    assert job_state(state, NOW - 60, NOW - 60, NOW - 60, NOW).word == "starting"
    assert job_state(state, NOW - 20, NOW - 20, NOW - 20, NOW).word == "finished"


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a store with two trained runs; their configurations differ in one value."""
    root = tmp_path_factory.mktemp("trained") / "runs"
    for name, rate in (("slow", 1e-4), ("fast", 1e-2)):
        model = torch.nn.Linear(64, 64)
        optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
        metadata = {"optimizer": {"lr": rate, "kind": "adamw"}, "width": 64}
        with relight.Checkpointer(
            str(root / name),
            model=model,
            optimizer=optimizer,
            save=relight.every(steps=2),
            metadata=metadata,
            signals=False,
            limits=relight.Limits(when_busy="queue"),
        ) as ckpt:
            for step in range(ckpt.restore(), 6):
                loss = model(torch.ones(2, 64)).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                ckpt.step(step, loss=loss.item() + (name == "slow"))
    return root


@pytest.fixture
def server(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Yield a server over these runs, without events."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    with serving([trained], tmp_path) as made:
        yield made


def until(read: Callable[[], Any], wanted: Any) -> None:
    """Wait until ``read`` returns ``wanted``, up to 20 s."""
    ends = time.monotonic() + 20
    while (value := read()) != wanted and time.monotonic() < ends:
        time.sleep(0.1)
    assert value == wanted


def names(answer: Any) -> list[str]:
    """Return the names of the runs of an answer."""
    return [row["run"] for row in answer.json()["rows"]]


def test_configuration_host_and_metrics_are_in_the_table(server: Server) -> None:
    """A run's row has the metadata of its script, its host and its newest metrics. The page shows only values that differ."""
    rows = {row["run"]: row for row in server.get("/api/v1/runs").json()["rows"]}
    assert rows["slow"]["config"] == {"ranks": "1", "optimizer.lr": "0.0001", "optimizer.kind": "adamw", "width": "64"}
    assert rows["fast"]["host"] == socket.gethostname()[:64] and set(rows["fast"]["metrics"]) == {"loss"}
    assert rows["slow"]["duration_s"] is not None and rows["slow"]["state"] == "finished"
    page = server.get("/").text
    table = page.partition('id="configuration"')[2]
    assert "optimizer.lr" in table and "0.0001" in table and "optimizer.kind" not in table


def test_runs_are_found_and_sorted(server: Server) -> None:
    """A part of the name, a state and a key select and sort runs, on the page and in the API."""
    assert names(server.get("/api/v1/runs?find=FAS")) == ["fast"]
    assert names(server.get("/api/v1/runs?sort=-run")) == ["slow", "fast"]
    assert names(server.get("/api/v1/runs?sort=-metric:loss")) == ["slow", "fast"]
    assert names(server.get("/api/v1/runs?sort=metric:loss&limit=1")) == ["fast"]
    assert names(server.get("/api/v1/runs?sort=metric:loss&limit=1&after=1")) == ["slow"]
    assert sorted(names(server.get("/api/v1/runs?state=finished"))) == ["fast", "slow"]
    assert names(server.get("/api/v1/runs?state=running")) == []
    assert "No run matches" in server.get("/?find=nowhere").text
    assert 'aria-sort="descending"' in server.get("/?sort=-step").text


def test_damage_is_shown_wherever_the_checkpoint_is(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Damage that the server meets while it reads values is in the list, on the run's and the checkpoint's page, and in comparisons."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    root = shutil.copytree(trained, tmp_path / "runs")
    (pack,) = root.glob("fast/0000000005-*/pack-*")
    data = bytearray(pack.read_bytes())
    data[len(data) // 2] ^= 1
    pack.write_bytes(data)
    with serving([root], tmp_path) as server:
        base = "/runs/runs/fast"
        newest = server.get(f"/api/v1{base}/checkpoints").json()["rows"][0]
        assert newest["state"] == "good" and newest["step"] == 5
        until(lambda: _read_all_values(server, base) or _states(server, base), ["damaged", "good", "good"])
        for page in (base, f"{base}/checkpoints/{newest['id']}"):
            assert '<span class="is failed">damaged</span>' in server.get(page).text, page
        page = server.get(f"{base}/checkpoints/{newest['id']}", "admin").text
        assert "cannot be restored as a whole" in page and "Verify…" in page and "Promote…" not in page
        compare = "/compare?a=fast@step=3&b=fast@latest"
        until(lambda: server.get(compare).text.count('<span class="is failed">damaged</span>'), 1)


def test_a_comparison_that_meets_damage_shows_it(
    trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The side that is damaged is named as damaged, also in the run's list."""
    monkeypatch.setenv("RELIGHT_EVENTS", str(tmp_path / "events"))
    root = shutil.copytree(trained, tmp_path / "runs")
    (pack,) = root.glob("slow/0000000005-*/pack-*")
    pack.write_bytes(bytes(pack.stat().st_size))
    with serving([root], tmp_path) as server:
        compare = "/compare?a=slow@step=3&b=slow@latest"
        until(lambda: server.get(compare).text.count('<span class="is failed">damaged</span>'), 1)
        assert _states(server, "/runs/runs/slow") == ["damaged", "good", "good"]


def _read_all_values(server: Server, base: str) -> None:
    for tensor in server.get(f"/api/v1{base}/checkpoints/latest").json()["tensors"]:
        server.get(f"/api/v1{base}/checkpoints/latest/values?path={tensor['path']}")


def _states(server: Server, base: str) -> list[str]:
    return [row["state"] for row in server.get(f"/api/v1{base}/checkpoints").json()["rows"]]


def test_a_job_on_this_machine_is_known_to_have_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The end that a process reported makes its job finished, and no save is offered."""
    root, events = make_store(tmp_path / "runs", 2, 3), tmp_path / "events"
    monkeypatch.setenv("RELIGHT_EVENTS", str(events))
    keep_events(events, str(root), {"event": "attempt.ended", "time": time.time()}, run="run-000")
    with serving([root], tmp_path) as server:
        until(lambda: server.get("/api/v1/runs/runs/run-000").json()["row"]["state"], "finished")
        assert server.get("/api/v1/runs/runs/run-001").json()["row"]["state"] == "running"
        assert "Save now…" not in server.get("/runs/runs/run-000", "operator").text
        assert "Save now…" in server.get("/runs/runs/run-001", "operator").text


def test_tracebacks_and_ends_in_words() -> None:
    """The last traceback of an output ends at its exception. An end is a signal's name, an exit code, or the supervisor."""
    lines = [
        "a",
        "[0] Traceback (most recent call last):",
        '[0]   File "x", line 1',
        "[0]     f()",
        "[0] ValueError: x",
        "[0] bye",
    ]
    assert traceback_of(lines) == lines[1:5]
    assert traceback_of(lines[:4]) == lines[1:4] and traceback_of(["a"]) == []
    words = [ended(-9, False), ended(1, False), ended(0, False), ended(None, False), ended(1, True), ended(-200, False)]
    assert words == [
        "killed by SIGKILL", "exit code 1", "ended normally", "was still running", "ended by the supervisor, after another rank", "killed by signal 200",
    ]  # fmt: skip
