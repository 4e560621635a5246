"""``relight run`` where the system refuses it descriptors, memory, threads or processes.

It began with ``ulimit -n 14`` (five minutes in torch's store, which could not connect to itself) and ``ulimit -v 700000`` (a traceback, and
"this is a bug in Relight").
"""

from __future__ import annotations

import resource
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing.api import SubprocessContext

from relight.errors import NoMemory
from relight.observe import Event, subscribe
from relight.supervise import elastic_agent, launch
from relight.supervise.elastic_agent import SupervisedAgent
from relight.supervise.refusals import limit_of, shown_refusal
from relight.supervise.settings import RunSettings


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
def test_too_few_descriptors_are_reported_before_anything_starts(soft: int, hard: int, ranks: int, outcome: str) -> None:
    """The soft limit is raised if that is enough, and only then."""
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[1] >= hard
    done = subprocess.run(
        [sys.executable, "-c", CHECK, str(soft), str(hard), str(ranks)], capture_output=True, text=True, check=False
    )  # fmt: skip
    assert outcome in done.stdout, done.stdout + done.stderr


@pytest.mark.parametrize("error", [RuntimeError("Resource temporarily unavailable"), OSError(24, "Too many open files"), MemoryError()])
def test_a_refusal_ends_the_job_with_its_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    """Exit code 1, and no traceback. Another error passes unchanged."""

    def refuse(*_: Any) -> Any:
        raise error

    monkeypatch.setattr(launch, "_run", refuse)
    options = launch.parse(["--nproc-per-node", "1", "train.py"])
    end = launch.launch(options, RunSettings(), tmp_path)
    assert (
        end.code == 1 and end.message.startswith("stopped: the system refused relight run what it needs") and "raise ulimit" in end.message
    )
    error = RuntimeError("shapes differ")
    with pytest.raises(RuntimeError, match="shapes differ"):
        launch.launch(options, RunSettings(), tmp_path)


def test_a_refused_poll_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks may train on. It is reported once, and other errors are raised."""
    errors: list[Exception] = [OSError(24, "Too many open files"), MemoryError(), ValueError("a fault")]

    def refuse() -> str:
        raise errors.pop(0)

    agent: Any = SupervisedAgent.__new__(SupervisedAgent)
    agent._pcontext, agent._is_refused = SubprocessContext.__new__(SubprocessContext), False
    agent._supervisor = SimpleNamespace(poll=refuse, announced="", steps=0)
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
