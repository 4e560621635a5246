"""Waits of the training thread for processes other than the agent, each tested by a process that is stopped."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from relight.capture import revision
from relight.checkpointer import takeover
from relight.comm.local_sockets import name_of

LISTENER = """
import os, signal, sys
from relight.comm.local_sockets import LocalDirectory
with LocalDirectory() as directory:
    listener = directory.listen(sys.argv[1], 1)
print("listens", flush=True)
os.kill(os.getpid(), signal.SIGSTOP)
"""


@pytest.fixture
def stopped() -> Iterator[tuple[str, int]]:
    """The name of an attempt's socket, and the stopped process that listens there."""
    name = name_of("attempt", "waits", str(os.getpid()))
    child = subprocess.Popen([sys.executable, "-c", LISTENER, name], stdout=subprocess.PIPE)
    assert child.stdout is not None
    assert child.stdout.readline() == b"listens\n"
    os.waitpid(child.pid, os.WUNTRACED)
    yield name, child.pid
    child.kill()
    child.wait()
    child.stdout.close()


def test_a_stopped_trainer_delays_a_start_by_a_second(stopped: tuple[str, int]) -> None:
    """A start that finds the run's stopped trainer waits ``GOING_S`` for its end, not for its answer, and takes it for one that lives."""
    name, pid = stopped
    sign = takeover.Sign(1, 1, name, "here", pid, 0.0, certain=True)
    before = time.monotonic()
    assert takeover._listener(name) == pid
    assert not takeover._goes(sign, takeover.GOING_S)
    for _ in range(4):  # more than its backlog holds
        takeover._notify(name)
    assert time.monotonic() - before < takeover.GOING_S + 3


def test_a_stopped_git_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A git that is stopped takes its own bound, and the revision is unknown."""
    git = tmp_path / "git"
    git.write_text("#!/bin/sh\nkill -STOP $$\n")
    git.chmod(0o700)
    (tmp_path / "train.py").touch()
    monkeypatch.setattr(revision, "_git", lambda: str(git))
    monkeypatch.setattr(revision, "_script", lambda: tmp_path / "train.py")
    monkeypatch.setattr(revision, "GIT_S", 0.5)
    before = time.monotonic()
    assert revision.code_revision() is None
    assert time.monotonic() - before < 5
