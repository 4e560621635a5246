"""A stopped agent holds nothing: every wait of the trainer's thread for it has a bound, and its end is reported."""

from __future__ import annotations

import gc
import os
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from torch import nn

import relight
from relight.agent import client, connect, launch
from relight.agent.wire import AgentConnection, ConnectionLost
from relight.checkpointer.grace_period import GracePeriod
from relight.comm import standstill
from relight.comm.process_state import STOPPED, process_at
from relight.log import Log, fold
from relight.observe import Event, subscribe
from relight.store import open_bytes

SOON_S = 0.2


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RELIGHT_BACKGROUND", "1")
    for module, name in (
        (standstill, "CONTINUE_AFTER_S"),
        (standstill, "END_AFTER_S"),
        (client, "CHECK_S"),
        (launch, "CONTINUE_AFTER_S"),
        (launch, "END_AFTER_S"),
    ):
        monkeypatch.setattr(module, name, SOON_S)


@pytest.fixture
def seen() -> Iterator[list[Event]]:
    """Events of this test."""
    events: list[Event] = []
    undo = subscribe(events.append)
    yield events
    undo()


@pytest.fixture
def stopped() -> Iterator[list[psutil.Process]]:
    """Processes that a test stops, which end with it."""
    processes: list[psutil.Process] = []
    yield processes
    for process in processes:
        if process.is_running():
            process.kill()


def trained(folder: Path, deadline_s: float = 60.0) -> tuple[relight.Checkpointer, psutil.Process]:
    """A Checkpointer with one durable save of step 0, and its agent."""
    ckpt = relight.Checkpointer(
        folder / "store" / "run",
        model=nn.Linear(8, 8),
        save=relight.every(steps=1),
        limits=relight.Limits(deadline_s=deadline_s),
    )
    ckpt.restore()
    ckpt.save(0)
    return ckpt, psutil.Process(ckpt._saves.writer._agent.pid)  # type: ignore[union-attr]


def steps_of(folder: Path) -> list[int]:
    return [checkpoint.step for checkpoint in fold(Log(open_bytes(folder / "store"), "run").read()).live]


def actions(seen: list[Event]) -> list[str]:
    return [event.fields["action"] for event in seen if event.name == "agent.stopped"]


def test_a_stopped_agent_is_continued(tmp_path: Path, seen: list[Event], stopped: list[psutil.Process]) -> None:
    """close() continues a stopped agent, loses no save, and reports it once."""
    ckpt, agent = trained(tmp_path)
    stopped.append(agent)
    agent.suspend()
    longest = 0.0
    for step in range(1, 6):
        before = time.monotonic()
        ckpt.step(step)
        longest = max(longest, time.monotonic() - before)
    before = time.monotonic()
    ckpt.close()
    assert time.monotonic() - before < 10
    assert longest < 1
    assert actions(seen) == ["continued"]
    assert steps_of(tmp_path)[-1] == 5
    assert not [event for event in seen if event.name == "save.failed"]


def test_an_agent_that_stays_stopped_is_replaced(
    tmp_path: Path, seen: list[Event], stopped: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that no signal continues (a debugger has it) is ended, its saves are reported once each, and the last step is saved."""
    monkeypatch.setattr(standstill, "wake", lambda process, seconds, words: False)
    ckpt, agent = trained(tmp_path)
    stopped.append(agent)
    agent.suspend()
    for step in range(1, 6):
        ckpt.step(step)
    before = time.monotonic()
    ckpt.close()
    assert time.monotonic() - before < 15
    assert actions(seen) == ["ended"]
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE
    assert steps_of(tmp_path)[-1] == 5
    failed = [event.fields["step"] for event in seen if event.name == "save.failed"]
    assert failed and len(failed) == len(set(failed))


def test_saves_without_a_waiting_caller_continue_too(
    tmp_path: Path, seen: list[Event], stopped: list[psutil.Process]
) -> None:
    """A stopped agent that has a save to write is continued during training, before progress is lost."""
    ckpt, agent = trained(tmp_path)
    stopped.append(agent)
    agent.suspend()
    ckpt.save(1, block=False)
    ends = time.monotonic() + 15
    while steps_of(tmp_path)[-1] != 1 and time.monotonic() < ends:
        time.sleep(0.05)
    assert steps_of(tmp_path)[-1] == 1
    ckpt.close()
    assert actions(seen) == ["continued"]


def test_an_idle_agent_may_be_stopped(tmp_path: Path, seen: list[Event], stopped: list[psutil.Process]) -> None:
    """A stopped agent that the trainer does not need is left alone."""
    ckpt, agent = trained(tmp_path)
    stopped.append(agent)
    agent.suspend()
    time.sleep(4 * SOON_S)
    assert agent.status() == psutil.STATUS_STOPPED and not actions(seen)
    ckpt.close()
    assert actions(seen) == ["continued"]


@pytest.mark.parametrize("wakes", [True, False])
def test_an_agent_of_before_is_stopped(
    tmp_path: Path, seen: list[Event], stopped: list[psutil.Process], monkeypatch: pytest.MonkeyPatch, wakes: bool
) -> None:
    """A start that finds a stopped agent continues it, or ends it and starts another."""
    if not wakes:
        monkeypatch.setattr(launch, "wake", lambda process, seconds: False)
    first = connect(str(tmp_path / "store"), "run")
    agent = psutil.Process(first.pid)
    stopped.append(agent)
    agent.suspend()
    before = time.monotonic()
    second = connect(str(tmp_path / "store"), "run")
    assert time.monotonic() - before < 10
    assert (second.pid == first.pid) is wakes
    stopped.append(psutil.Process(second.pid))
    assert actions(seen) == ["continued" if wakes else "ended"]
    first.close()
    second.close()


def test_an_agent_is_stopped_before_it_listens(
    tmp_path: Path, seen: list[Event], stopped: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that is stopped while it starts is continued within the start's deadline."""
    start = launch._start

    def start_stopped(*words: object) -> subprocess.Popen[bytes]:
        process = start(*words)  # type: ignore[arg-type]
        os.kill(process.pid, signal.SIGSTOP)
        stopped.append(psutil.Process(process.pid))
        return process

    monkeypatch.setattr(launch, "_start", start_stopped)
    agent = connect(str(tmp_path / "store"), "run")
    assert actions(seen) == ["continued"]
    agent.close()


def test_an_agent_that_does_nothing_takes_one_deadline(
    tmp_path: Path, seen: list[Event], stopped: list[psutil.Process], monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the agent runs but does nothing, all waits of close() share one deadline. Each save is reported once."""
    monkeypatch.setattr(standstill.Standstill, "check", lambda self, needed: True)  # as if the agent made progress
    ckpt, agent = trained(tmp_path, deadline_s=2.0)
    stopped.append(agent)
    agent.suspend()
    for step in range(1, 6):
        ckpt.step(step)
    before = time.monotonic()
    ckpt.close()
    assert time.monotonic() - before < 5
    late = [event for event in seen if event.name == "save.failed"]
    assert len(late) == len({event.fields["step"] for event in late}) == 2
    assert steps_of(tmp_path)[-1] == 5  # made by the trainer


SCRIPT = """
import os, signal, sys, time, torch
import relight
torch.set_num_threads(1)
ckpt = relight.Checkpointer(sys.argv[1], model=torch.nn.Linear(8, 8), save=relight.every(steps=1), background=True)
ckpt.restore()
ckpt.save(0)
if sys.argv[2] == "dead":
    from relight.comm import standstill
    standstill.Standstill.check = lambda self, needed: True
os.kill(ckpt._saves.writer._agent.pid, signal.SIGSTOP)
for step in range(1, 5):
    ckpt.step(step)
print(ckpt._saves.writer._agent.pid, time.monotonic(), flush=True)
signal.raise_signal(signal.SIGTERM)
ckpt.step(5)
"""


@pytest.mark.parametrize("agent", ["stopped", "dead"])
def test_a_grace_bounds_every_wait(tmp_path: Path, agent: str) -> None:
    """SIGTERM with a grace period of 8 s ends the process in time. A stopped agent costs no step."""
    environment = {**os.environ, "RELIGHT_GRACE_S": "8"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path / "store" / "run"), agent],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    ended = time.monotonic()
    assert done.stdout, done.stderr
    pid, began = done.stdout.split()[:2]
    if psutil.pid_exists(int(pid)):
        os.kill(int(pid), signal.SIGKILL)
    assert done.returncode == -signal.SIGTERM, done.stderr
    assert ended - float(began) < 10, done.stderr
    if agent == "stopped":
        assert steps_of(tmp_path)[-1] == 5, done.stderr


def test_a_full_socket_ends_the_connection() -> None:
    """A message that the other end does not read fails after the bound, and the connection sends nothing more."""
    here, remote = socket.socketpair()
    wire: AgentConnection[object] = AgentConnection(here, object)
    wire.bound(0.2, 1.0, lambda: None)
    before = time.monotonic()
    with pytest.raises(ConnectionLost, match="does not read its messages"):
        wire.send(b"x" * (8 << 20))
    assert time.monotonic() - before < 5
    with pytest.raises(ConnectionLost):
        wire.send(b"y")
    wire.close()
    remote.close()


def test_the_waits_of_close_share_one_deadline() -> None:
    """Each wait of close() gets the time that earlier waits left. A grace period that ends sooner counts instead."""
    now = [0.0]
    moments = GracePeriod(lambda: now[0])
    assert moments.bound(5.0) == 5.0
    moments.closing(10.0)
    now[0] = 8.0
    moments.closing(10.0)
    assert moments.bound(5.0) == 2.0
    now[0] = 11.0
    assert moments.bound(5.0) == 0.0


def test_the_state_of_a_process() -> None:
    """A process is identified by its id and start time. A stopped process is reported as stopped, a later one with its
    id as another."""
    child = subprocess.Popen(["sleep", "60"])
    try:
        result = process_at(child.pid)
        assert result is not None and result.state in "SRD"
        os.kill(child.pid, signal.SIGSTOP)
        os.waitpid(child.pid, os.WUNTRACED)
        assert result.state in STOPPED and "stopped" in result.words
        assert not result._replace(started="1").send(signal.SIGKILL)
        assert child.poll() is None
        assert result.send(signal.SIGKILL)
    finally:
        child.kill()
        child.wait()
    assert result.state == "" and result.words == "gone"
    assert process_at(0) is None


def test_a_forgotten_background_is_collected(tmp_path: Path) -> None:
    """The check of the agent keeps no Checkpointer alive: one that its owner dropped lets its agent go."""
    ckpt, agent = trained(tmp_path)
    background = weakref.ref(ckpt._saves.writer)  # type: ignore[arg-type]
    del ckpt
    gc.collect()
    assert background() is None
    psutil.wait_procs([agent], 10)
    assert not agent.is_running() or agent.status() == psutil.STATUS_ZOMBIE
