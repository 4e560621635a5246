"""A process of this host that is not proved to have ended is not taken for dead."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import relight
from relight.checkpointer import takeover
from relight.checkpointer.unreachable_writer import may_live
from relight.cli import cli
from relight.comm import local_sockets
from relight.comm.local_sockets import LocalDirectory, name_of
from relight.errors import LeaseHeld
from relight.store import LocalStore

AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can act as another user")
SLEEPS = ["sh", "-c", "echo && exec sleep 60"]


@pytest.fixture
def process(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[subprocess.Popen[str]]:
    """A sleeping process of this user, of another user, or with another directory of sockets."""
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(tmp_path)])
    kind = getattr(request, "param", "this user")
    command, user = list(SLEEPS), None
    if kind == "other user":
        user = 65534
    elif kind == "other directory":
        command = ["unshare", "--mount", "sh", "-c", f'mount -t tmpfs none {tmp_path} && exec "$@"', "sh", *command]
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
    "process",
    ["this user", pytest.param("other user", marks=AS_ROOT), pytest.param("other directory", marks=AS_ROOT)],
    indirect=True,
)
def test_a_process_without_a_socket_is_known_by_its_id_and_start(process: subprocess.Popen[str]) -> None:
    """A process may be alive if it started before its record. A later process with its id is another one."""
    address = name_of("attempt")
    assert may_live(process.pid, time.time(), address)
    assert not may_live(process.pid, time.time() - 1000, address)
    process.kill()
    process.wait()
    assert not may_live(process.pid, time.time(), address)
    assert not may_live(os.getpid(), time.time(), address) and not may_live(0, time.time(), address)


def test_a_left_socket_proves_that_its_attempt_has_ended(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A live process has ended its attempt if its socket file exists without a listener. A held lock proves nothing."""
    address = name_of("attempt")
    with LocalDirectory() as directory:
        listener = directory.listen(address, 1)
        assert may_live(process.pid, time.time(), address)
        listener.leave()
        assert not may_live(process.pid, time.time(), address) and not may_live(process.pid, time.time(), address)
        assert may_live(process.pid, time.time(), name_of("another attempt"))
        monkeypatch.setattr(local_sockets, "_LOCK_S", 0.01)
        with directory._locked():
            assert may_live(process.pid, time.time(), address)
        directory.listen(address, 1).close()  # simulate a cleaner: the file is gone
        assert may_live(process.pid, time.time(), address)


@pytest.mark.parametrize("unreadable", ["stat", "boot"])
def test_a_process_that_cannot_be_read_may_live(
    process: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, unreadable: str
) -> None:
    """If /proc hides a process or its start, its id alone decides."""
    monkeypatch.setattr(
        Path, "read_text", lambda path, **_: "0 (sleep) S" if unreadable == "boot" else open("/nonexistent").read()
    )
    assert may_live(process.pid, time.time() - 1000, name_of("attempt"))
    process.kill()
    process.wait()
    assert not may_live(process.pid, time.time(), name_of("attempt"))


@pytest.fixture
def trained(
    process: subprocess.Popen[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[relight.Checkpointer]:
    """A run that was saved a moment ago. Its records seem to be of ``process``."""
    ckpt = relight.Checkpointer(
        tmp_path / "store" / "run", state={"x": 1}, save=relight.every(steps=1), background=False
    )
    ckpt.restore()
    ckpt.step(0)
    monkeypatch.setattr(takeover, "process_of", lambda writer: (takeover._host(), process.pid))
    yield ckpt
    ckpt.close()


@pytest.mark.parametrize("way", ["other network", "squatted", "no directory", "cleaned", "never listened"])
def test_a_second_start_is_refused_if_the_socket_is_not_found(
    trained: relight.Checkpointer,
    process: subprocess.Popen[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str,
) -> None:
    """A live process of this host without a socket may still train, even if it saves rarely. A dead process does not
    block a start."""
    listener = trained._session.takeover._listener
    assert listener is not None
    file = Path(listener._path) / f"{listener.name}.sock"
    store = LocalStore(tmp_path / "store")
    sign = takeover.sign_of_life(store, "run")
    assert sign is not None and sign.certain
    if way == "other network":
        monkeypatch.setattr(local_sockets, "_network", lambda: "net:[1]")
    elif way == "squatted":
        file.parent.parent.chmod(0o777)
    elif way == "no directory":
        monkeypatch.setattr(local_sockets, "_tops", list)
    else:
        if way == "never listened":
            trained._session.takeover.release()
        file.unlink()
    assert not takeover._goes(sign._replace(pid=process.pid, address=takeover.name_of("x")), 0.0)
    monkeypatch.setattr(takeover, "GOING_S", 0.0)
    monkeypatch.setattr(takeover, "_age", lambda record: 600.0)
    sign = takeover.sign_of_life(store, "run")
    assert sign is not None and not sign.certain and sign.alive and sign.pid == process.pid
    with pytest.raises(LeaseHeld, match=rf"process {process.pid} on this host .* may still train this run"):
        relight.Checkpointer(tmp_path / "store" / "run", state={"x": 1}, background=False).restore()
    process.kill()
    process.wait()
    assert takeover.sign_of_life(store, "run") is None
    if way == "squatted":
        file.parent.parent.chmod(0o700)


def test_a_process_that_listens_for_other_runs_only_is_not_in_the_way(
    process: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A copy of a run may be trained while the process that made its records trains the original."""
    ours, theirs = name_of("copy"), name_of("original")
    with LocalDirectory() as directory:
        listener = directory.listen(theirs, 1)
    read, write = os.pipe()
    if not (child := os.fork()):  # the child holds the listener, and the kernel lists it
        os.read(read, 1)
        os._exit(0)
    assert not may_live(child, time.time(), ours)
    assert may_live(child, time.time(), theirs)
    Path(listener._path, f"{theirs}.sock").unlink()  # simulate a cleaner
    assert may_live(child, time.time(), theirs)
    assert may_live(process.pid, time.time(), ours)
    os.write(write, b"x")
    os.waitpid(child, 0)
    os.close(read)
    os.close(write)
    listener.socket.close()


def test_a_trainer_makes_a_removed_socket_again(
    trained: relight.Checkpointer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a cleaner removed a trainer's socket file, the trainer creates it again at a later step."""
    listener, store = trained._session.takeover._listener, LocalStore(tmp_path / "store")
    assert listener is not None
    (Path(listener._path) / f"{listener.name}.sock").unlink()
    monkeypatch.setattr(takeover, "FOUND_S", 0.0)
    trained.step(1)
    sign = takeover.sign_of_life(store, "run")
    assert sign is not None and sign.certain
    kept = trained._session.takeover._listener
    trained.step(2)
    assert trained._session.takeover._listener is kept


def test_a_second_start_does_not_wait_for_an_attempt_that_ended(trained: relight.Checkpointer, tmp_path: Path) -> None:
    """A process that lives after it gave the run up is not in the way, and its socket's file proves it for an hour."""
    trained._session.takeover.release()
    assert takeover.sign_of_life(LocalStore(tmp_path / "store"), "run") is None


@pytest.mark.parametrize("process", [pytest.param("other user", marks=AS_ROOT)], indirect=True)
def test_a_second_start_sees_another_users_process(
    trained: relight.Checkpointer, process: subprocess.Popen[str], tmp_path: Path
) -> None:
    """A run that another user's process of this host saved seconds ago shows a sign of life."""
    listener = trained._session.takeover._listener
    assert listener is not None
    listener.close()  # its socket is not visible here
    store = LocalStore(tmp_path / "store")
    sign = takeover.sign_of_life(store, "run")
    assert sign is not None and not sign.certain and sign.pid == process.pid
    process.kill()
    process.wait()
    assert takeover.sign_of_life(store, "run") is None


def test_a_process_that_copied_checkpoints_here_is_not_in_the_way(
    trained: relight.Checkpointer, tmp_path: Path
) -> None:
    """Write no FENCE for a copy, though the process that made it is alive: a copy is no attempt."""
    assert (
        cli.main(["cp", str(tmp_path / "store" / "run"), str(tmp_path / "copies" / "run")], standalone_mode=False) == 0
    )
    assert takeover.sign_of_life(LocalStore(tmp_path / "copies"), "run") is None
    sign = takeover.sign_of_life(LocalStore(tmp_path / "store"), "run")
    assert sign is not None
