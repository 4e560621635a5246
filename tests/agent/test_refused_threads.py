"""An agent at its limit of threads: saves are written, restores do not wait, and the process ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import relight
from relight.agent import launch, server
from relight.comm.local_sockets import LocalDirectory
from relight.observe import counters


def until(true: Callable[[], bool], seconds: float = 20.0) -> bool:
    """Wait until ``true()`` is true. Return whether it is."""
    ends = time.monotonic() + seconds
    while not true() and time.monotonic() < ends:
        time.sleep(0.01)
    return true()


@pytest.fixture
def run(tmp_path: Path) -> str:
    return str(tmp_path / "store" / "run")


@pytest.fixture
def agent(run: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[server.AgentServer, threading.Thread]]:
    """Run the run's agent in a thread of this process, and let the system refuse the threads that write."""
    start = threading.Thread.start

    def refused(self: threading.Thread) -> None:
        if self.name == "relight-agent-writer":
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", refused)
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("another agent was started"))
    name = launch.address_of(os.path.dirname(run), "run")
    with LocalDirectory() as directory:
        listener = directory.listen(name, 16)
    made = server.AgentServer(listener.socket, 60.0, name)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made, thread
    made.end(0, None)
    thread.join(20)
    listener.close()


def test_saves_are_written_without_a_thread_for_them(
    run: str, agent: tuple[server.AgentServer, threading.Thread]
) -> None:
    """The thread that receives a trainer's messages writes its saves, with the right bytes, and the agent ends.

    Symptom: the agent dropped its trainer, counted a save as being written for ever, and kept the slots' memory. Each
    restore on this node waited for two minutes.
    """
    made, thread = agent
    model, before = torch.nn.Linear(64, 64), counters["agent.lost"]
    with relight.Checkpointer(run, model=model, signals=False, background=True, save=None) as ckpt:
        for step in range(3):
            with torch.no_grad():
                model.weight.fill_(step)
            assert ckpt.save(step, block=step == 1).wait(60).error is None
        assert until(lambda: not made._writes()) and len(made._sessions) == 1
    assert counters["agent.lost"] == before
    thread.join(20)
    assert not thread.is_alive() and not made._pending
    checkpoints = list(relight.open(run).checkpoints())
    assert [checkpoint.step for checkpoint in checkpoints] == [0, 1, 2]
    assert [findings for _, findings in relight.open(run).verify()] == [[]] * 3


TRAINER = """
import os, signal, sys, torch, relight
from relight.agent import Agent
ckpt = relight.Checkpointer(sys.argv[1], x=torch.zeros(1000), signals=False, background=True, save=None)
assert ckpt.save(0).wait(60).error is None
Agent.save = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
ckpt._capture.components["x"].fill_(7)
ckpt.save(1, block=False)
"""


def test_a_save_of_a_killed_trainer_is_written(run: str, agent: tuple[server.AgentServer, threading.Thread]) -> None:
    """A save that a trainer sealed, but did not announce before its death, is committed. The next restore reads it from
    memory, and does not wait."""
    made, _ = agent
    trainer = subprocess.run([sys.executable, "-c", TRAINER, run], timeout=120)
    assert trainer.returncode == -signal.SIGKILL
    restored, began = torch.zeros(1000), time.monotonic()
    with relight.Checkpointer(run, x=restored, signals=False, background=True, save=None) as ckpt:
        assert ckpt.restore() == 2
    assert time.monotonic() - began < 30 and bool((restored == 7).all())
    assert until(lambda: not made._pending)
