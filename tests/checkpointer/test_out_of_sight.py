"""A process of this host whose sockets cannot be seen is not taken for dead."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import relight
from relight.checkpointer import takeover
from relight.checkpointer.out_of_sight import out_of_sight
from relight.store import LocalStore
from relight.world import local_sockets

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can act as another user")
SLEEPS = ["sh", "-c", "echo && exec sleep 60"]


@pytest.fixture
def process(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen[str]]:
    """One that sleeps: as this user, as another user, or with another directory of sockets."""
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(tmp_path)])
    command, user = list(SLEEPS), None
    if request.param == "other user":
        user = 65534
    elif request.param == "other directory":
        command = ["unshare", "--mount", "sh", "-c", f"mount -t tmpfs none {tmp_path} && exec \"$@\"", "sh", *command]
    started = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, user=user)
    assert started.stdout is not None
    if not started.stdout.readline():
        started.wait()
        pytest.skip("mounts are not allowed here")
    yield started
    started.kill()
    started.wait()
    started.stdout.close()


@pytest.mark.parametrize(
    ("process", "hidden"),
    [("this user", False), pytest.param("other user", True, marks=AS_ROOT), pytest.param("other directory", True, marks=AS_ROOT)],
    indirect=["process"],
)
def test_who_cannot_be_seen_is_known_by_its_id_and_start(process: subprocess.Popen[str], hidden: bool) -> None:
    """It lives, has another private directory, and began before its record: a later process with its id is another one."""
    assert out_of_sight(process.pid, time.time()) is hidden
    assert not out_of_sight(process.pid, time.time() - 1000)
    process.kill()
    process.wait()
    assert not out_of_sight(process.pid, time.time())
    assert not out_of_sight(os.getpid(), time.time()) and not out_of_sight(0, time.time())


@pytest.mark.parametrize("process", [pytest.param("other user", marks=AS_ROOT)], indirect=True)
def test_a_second_start_waits_for_another_users_process(process: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that another user's process of this host saved seconds ago shows a sign of life, as on another host."""
    ckpt = relight.Checkpointer(tmp_path / "store" / "run", state={"x": 1}, save=relight.every(steps=1))
    ckpt.restore()
    ckpt.step(0)
    ckpt._takeover.release()  # its socket is not to be seen here
    store = LocalStore(tmp_path / "store")
    assert takeover.look(store, "run") is None
    monkeypatch.setattr(takeover, "process_of", lambda writer: (takeover._host(), process.pid))
    sign = takeover.look(store, "run")
    assert sign is not None and not sign.certain and sign.pid == process.pid
    process.kill()
    process.wait()
    assert takeover.look(store, "run") is None
    ckpt.close()
