"""``relight run`` where the system refuses it descriptors, memory, threads or processes.

It began with ``ulimit -n 14`` (five minutes in torch's store, which could not connect to itself) and ``ulimit -v 700000`` (a traceback, and
"this is a bug in Relight").
"""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from relight import cli
from relight.errors import NoMemory
from relight.heartbeat import Heartbeat, HeartbeatPage
from relight.heartbeat.heartbeat_page import make_page
from relight.observe import Event, subscribe
from relight.settings.supervise_settings import SuperviseSettings
from relight.supervise import elastic_agent, launch, shared_pages
from relight.supervise.accounting import ACCOUNT_S
from relight.supervise.elastic_agent import SupervisedAgent
from relight.supervise.facts import Worker
from relight.supervise.notices import Notices
from relight.supervise.refusals import limit_of, shown_refusal
from relight.supervise.rendezvous_thread import Joining
from relight.supervise.supervisor import Supervisor


@pytest.mark.parametrize(
    ("error", "limit"),
    [
        (OSError(24, "Too many open files"), "ulimit -n"), (RuntimeError("… (errno: 24 - Too many open files)."), "ulimit -n"),
        (RuntimeError("can't start new thread"), "ulimit -u"), (BlockingIOError(11, "Resource temporarily unavailable"), "ulimit -u"),
        (RuntimeError("Resource temporarily unavailable"), "ulimit -u"), (MemoryError(), "ulimit -v"), (OSError(12, "no"), "ulimit -v"),
        (OSError(2, "no such file"), ""), (RuntimeError("shapes differ"), ""), (NoMemory("no memory for a tensor"), ""),
    ],
)  # fmt: skip
def test_which_errors_are_refusals_and_which_limit_to_raise(error: Exception, limit: str) -> None:
    """By number where there is one, else by torch's words."""
    found_limit = limit_of(error)
    assert found_limit.startswith(limit) and bool(found_limit) is bool(limit)
    assert not limit or found_limit in shown_refusal(error, found_limit)


CHECK = """
import resource, sys
from relight.errors import ConfigError
from relight.supervise.refusals import check_descriptors
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    check_descriptors(int(sys.argv[3]))
    print("starts", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
except ConfigError as error:
    print(error)
"""


@pytest.mark.parametrize(
    ("soft", "hard", "ranks", "outcome"),
    [
        (14, 14, 1, "15 descriptors are needed for 1 rank"),
        (14, 256, 1, "starts 256"),
        (64, 256, 1, "starts 64"),
        (64, 64, 64, "141 descriptors"),
    ],
)
def test_too_few_descriptors_are_reported_before_anything_starts(
    soft: int, hard: int, ranks: int, outcome: str
) -> None:
    """The soft limit is raised if that is enough, and only then."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(soft), str(hard), str(ranks)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert outcome in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize(
    "error", [RuntimeError("Resource temporarily unavailable"), OSError(24, "Too many open files"), MemoryError()]
)
def test_a_refusal_ends_the_job_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    """Exit code 1, and no traceback. Another error passes unchanged."""

    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(launch, "_run", refuse)
    options = launch.parse(["--nproc-per-node", "1", "train.py"])
    end = launch.launch(options, SuperviseSettings(), tmp_path)
    assert (
        end.code == 1
        and end.message.startswith("stopped: the system refused relight run what it needs")
        and "raise ulimit" in end.message
    )
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        launch.launch(options, SuperviseSettings(), tmp_path)


def test_a_refused_poll_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks may train on. It is reported once, and other errors are raised."""
    errors: list[Exception] = [OSError(24, "Too many open files"), MemoryError(), ValueError("a fault")]

    def refuse() -> str:
        raise errors.pop(0)

    agent: Any = SupervisedAgent.__new__(SupervisedAgent)
    agent._pcontext, agent._is_refused, agent._keeps_logs = SubprocessContext.__new__(SubprocessContext), False, True
    agent._supervisor = SimpleNamespace(poll=refuse, announced="", incarnation=SimpleNamespace(steps=0))
    monkeypatch.setattr(elastic_agent, "_exits", lambda _: {0: None})
    emitted: list[Event] = []
    end = subscribe(emitted.append)
    try:
        assert [agent._monitor_workers(None).state for _ in range(2)] == [WorkerState.HEALTHY] * 2
        with pytest.raises(ValueError, match="a fault"):
            agent._monitor_workers(None)
    finally:
        end()
    assert [event.name for event in emitted] == ["run.refused"]


def test_without_threads_the_rendezvous_is_asked_later_or_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before, the next poll ended the job, although its ranks trained."""
    refused = [True]

    def start(thread: threading.Thread) -> None:
        if refused[0]:
            raise RuntimeError("can't start new thread")
        thread.start()

    monkeypatch.setattr("relight.comm.new_threads.start_thread", start)
    inner: Any = SimpleNamespace(num_nodes_waiting=lambda: 2, next_rendezvous=lambda: "round 1")
    joining = Joining(lambda: inner, 600, lambda info: info)
    assert joining.num_nodes_waiting() == 0
    assert joining.next_rendezvous() == "round 1"  # type: ignore[comparison-overlap]
    refused[0] = False
    assert joining.num_nodes_waiting() == 2


def test_a_supervisor_without_threads_still_decides(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accounts, requests and the check of another attempt are left out. No call raises."""

    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("relight.comm.new_threads.start_thread", refuse)
    now = [time.monotonic()]
    supervisor = Supervisor(
        SuperviseSettings(),
        "job",
        tmp_path,
        lambda: now[0],
        notices=Notices(["http://127.0.0.1:9/notice"]),
    )
    page = supervisor.begin([0], {})[0]["RELIGHT_HEARTBEAT"]
    supervisor.started({0: os.getpid()})
    make_page(page)
    HeartbeatPage(page).write(
        Heartbeat(pid=os.getpid(), phase="training", step=3, steps=3, url=str(tmp_path / "store"), run="run")
    )
    now[0] += 2 * ACCOUNT_S
    assert supervisor.poll() == ""
    assert supervisor.failed([Worker(0, -9, died_at=1.0)]).action == "resume"
    supervisor.close()


@pytest.mark.parametrize(
    ("error", "is_refusal"),
    [(MemoryError(), True), (RuntimeError("can't start new thread"), True), (KeyError(1), False)],
)
def test_a_command_without_memory_reports_no_bug(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, is_refusal: bool
) -> None:
    """With 550 MB of address space torch's import ends by MemoryError, in any command that needs torch."""

    def refuse(**_: Any) -> Any:
        raise error

    monkeypatch.setattr(cli.cli, "main", refuse)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    words = capsys.readouterr().err
    assert ended.value.code == 2
    assert ("refused this command what it needs" in words) is is_refusal
    assert ("this is a bug in Relight" in words) is not is_refusal


@pytest.mark.parametrize(
    ("free_bytes", "free_files", "files", "place"),
    [
        (1 << 30, 1000, 1000, "memory"), (64 << 10, 1000, 1000, "temporary"), (1 << 30, 3, 6, "temporary"), (1 << 30, 0, 0, "memory"),
    ],
)  # fmt: skip
def test_pages_go_where_there_is_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, free_bytes: int, free_files: int, files: int, place: str
) -> None:
    """A container's /dev/shm may be tiny, or full. A file system without inodes has no limit for them."""
    monkeypatch.setattr(shared_pages, "MEMORY", str(tmp_path))
    monkeypatch.setattr(tempfile, "gettempdir", lambda: "temporary")
    status = SimpleNamespace(f_bavail=free_bytes // 4096, f_frsize=4096, f_files=files, f_favail=free_files)
    monkeypatch.setattr(os, "statvfs", lambda _: status)
    assert shared_pages.memory() == (tmp_path if place == "memory" else Path("temporary"))
