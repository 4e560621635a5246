"""The agent's socket: no process without the secret of this user's private directory gets a key, a descriptor or an answer."""

from __future__ import annotations

import contextlib
import errno
import gc
import mmap
import os
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
from tests.descriptors import new_descriptors, open_descriptors

from relight.agent import launch, server
from relight.agent.client import Agent
from relight.agent.messages import (
    AllocateSlots,
    ForwardedEvent,
    HeldList,
    ListHeld,
    OpenRun,
    PeerAddress,
    SaveResult,
    ToAgent,
    ToTrainer,
)
from relight.agent.wire import AgentConnection, ConnectionLost
from relight.arena import PAGE, SharedMapping, Slot, allocate
from relight.comm import local_sockets
from relight.comm.local_sockets import Listener, LocalDirectory, NotPrivate, name_of
from relight.comm.proof import ProofFailed, prove_as_caller, prove_as_listener
from relight.errors import StoreUnavailable

OTHER = 65534
TOPS = local_sockets._tops
AS_ROOT = pytest.mark.skipif(os.getuid() != 0, reason="only the superuser can act as another user")


@pytest.fixture(autouse=True)
def _own_top(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a separate directory for sockets."""
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(tmp_path)])


@pytest.fixture
def name() -> str:
    return launch.address_of("store", "run")


@pytest.fixture
def agent(name: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[server.AgentServer]:
    """Run an agent in a thread of this process. ``launch.connect`` starts no other."""
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("another agent was started"))
    with LocalDirectory() as directory:
        listener = directory.listen(name, 16)
    made = server.AgentServer(listener.socket, 60.0, name)
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    yield made
    made.end(0, None)
    thread.join(10)
    listener.close()


class Fake:
    """A process that listens under the agent's name, and keeps what it gets."""

    def __init__(self, name: str, answer: bytes = b"") -> None:
        with LocalDirectory() as directory:
            self.listener: Listener = directory.listen(name, 4)
        self.data, self.fds, self._answer = b"", list[int](), answer
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self) -> None:
        connection, _ = self.listener.socket.accept()
        with connection, contextlib.suppress(OSError):
            connection.settimeout(2.0)
            while True:
                data, fds, _, _ = socket.recv_fds(connection, 1 << 16, 16)
                self.data, self.fds = self.data + data, self.fds + fds
                if not data:
                    return
                if self._answer:
                    connection.sendall(self._answer)

    def close(self) -> None:
        self._thread.join(5)
        self.listener.close()


def test_a_fake_agent_gets_neither_key_nor_descriptor(name: str) -> None:
    """A process that listens under the agent's name without the secret gets only a nonce, and the trainer learns it at
    once."""
    fake = Fake(name, answer=os.urandom(64))
    before = time.monotonic()
    with pytest.raises(
        StoreUnavailable, match=f"process {os.getpid()} is not this run's agent: .*does not know the secret"
    ):
        launch.connect("store", "run")
    assert time.monotonic() - before < 3
    fake.close()
    assert len(fake.data) == 48 and fake.fds == []  # the protocol's name and a nonce


def test_a_proof_cannot_be_reflected(agent: server.AgentServer, name: str) -> None:
    """The agent's own proof is none of a caller's, nor is one for another socket of the same secret."""
    with LocalDirectory() as directory:
        secret = directory.secret()
        with directory.connect(name, 5.0) as caller:
            caller.sendall(b"relight-proof-1\n" + bytes(32))
            answer = caller.recv(64, socket.MSG_WAITALL)
            caller.sendall(answer[32:])
            assert caller.recv(1) == b""
        with directory.connect(name, 5.0) as caller, pytest.raises(ProofFailed):
            prove_as_caller(caller, secret, name_of("another"), 5.0)
        with directory.connect(name, 5.0) as caller, pytest.raises(ProofFailed):
            prove_as_caller(caller, os.urandom(32), name, 5.0)


def test_a_client_without_the_secret_gets_nothing(agent: server.AgentServer, name: str, tmp_path: Path) -> None:
    """Messages without a proof are not read: no answer, no descriptor, no session, and nothing is written for them."""
    for message in (OpenRun("store", "run", "s", "r", 1, 1, 0), AllocateSlots(PAGE, 1), ListHeld()):
        with LocalDirectory() as directory, directory.connect(name, 5.0) as stranger:
            body = msgspec.msgpack.encode(message)
            with contextlib.suppress(OSError):
                stranger.sendall((len(body).to_bytes(4, "little") + body).ljust(4096, b"\0"))
            data, fds = b"", list[int]()
            with contextlib.suppress(ConnectionError):
                data, fds, _, _ = socket.recv_fds(stranger, 4096, 16)
            assert (data, fds) == (b"", [])
    assert not agent._sessions and not agent._seen
    assert launch.connect("store", "run").alive


def test_no_abstract_name_is_left(agent: server.AgentServer, name: str, tmp_path: Path) -> None:
    """The agent is found at a path that only this user may enter, and under no name of the network namespace."""
    result = launch.connect("store", "run")
    shown = Path("/proc/net/unix").read_text()
    assert f"@relight-{name}" not in shown and "@relight-" not in shown.replace("@relight-attempt", "")
    folder = tmp_path / f"relight-{os.geteuid()}" / "sockets"
    assert folder.stat().st_mode & 0o777 == 0o700 and (folder / f"{name}.sock").is_socket()
    assert (folder / "secret").stat().st_mode & 0o777 == 0o600
    result.close()


def test_a_kept_slot_is_read_only(agent: server.AgentServer) -> None:
    """A trainer that restores from memory cannot write to it, by descriptor, by mapping, or by opening it again."""
    memory = SharedMapping(allocate(PAGE * 4), PAGE * 4, writable=True)
    slot = Slot(memory)
    slot.begin(1)
    slot.seal(1, PAGE, 10)
    agent._kept.append(server.CommittedSlot("a", 1, slot, 0, (PAGE,), server.TrainerSession(wire=None, open=False)))  # type: ignore[arg-type]
    result = launch.connect("store", "run")
    (memory_slot,) = result.held(10.0)
    assert os.pread(memory_slot.memory.fd, 8, 0) == b"relight1" and memory_slot.memory.view.readonly
    with pytest.raises(OSError):
        os.pwrite(memory_slot.memory.fd, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory_slot.memory.fd, PAGE)
    again = os.open(f"/proc/self/fd/{memory_slot.memory.fd}", os.O_RDWR)
    with pytest.raises(PermissionError):
        os.pwrite(again, b"x", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(again, PAGE)
    os.close(again)
    assert slot.state() == (2, 1)
    memory_slot.memory.close()
    result.close()
    agent._kept.clear()


@pytest.mark.parametrize("kind", ["link", "open to others", "file", pytest.param("another user's", marks=AS_ROOT)])
def test_a_squatted_directory_is_reported_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """A directory that another user made first is not used: the next place is, and without one a save states why within a second."""
    first, second = tmp_path / "first", tmp_path / "second"
    target = first / f"relight-{os.geteuid()}"
    for place in (first, second, tmp_path / "elsewhere"):
        place.mkdir()
    if kind == "link":
        target.symlink_to(tmp_path / "elsewhere")
    elif kind == "file":
        target.write_text("")
    else:
        target.mkdir()
        target.chmod(0o777)
        if kind != "open to others":
            target.chmod(0o755)
            os.chown(target, OTHER, OTHER)
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(first), str(second)])
    with LocalDirectory() as directory:
        assert directory.path.startswith(str(second))
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(first)])
    monkeypatch.setattr(launch, "_start", lambda *_: pytest.fail("an agent was started"))
    before = time.monotonic()
    with pytest.raises(StoreUnavailable, match=f"no private directory for its socket: {target} (is|belongs)"):
        launch.connect("store", "run")
    assert launch.reach("store", "run") is None
    assert time.monotonic() - before < 10
    assert not list((tmp_path / "elsewhere").iterdir())


@pytest.mark.parametrize("way", ["sockets", "above", "secret"])
def test_each_part_of_the_path_is_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """The directory of the sockets lets no other user in, none above it lets one rename, and the secret is a file that no other user reads."""
    with LocalDirectory() as directory:
        directory.secret()
        path = Path(directory.path)
    if way == "sockets":
        path.chmod(0o750)
    elif way == "above":
        tmp_path.chmod(0o777)
    else:
        (path / "secret").chmod(0o640)
    with pytest.raises(NotPrivate):  # noqa: SIM117
        with LocalDirectory() as directory:
            directory.secret()


@AS_ROOT
def test_another_user_cannot_reach_the_socket(agent: server.AgentServer, name: str, tmp_path: Path) -> None:
    """The directory refuses another user's process, even if its path is known."""
    for above in (tmp_path, *tmp_path.parents[:2]):
        above.chmod(0o755)
    path = tmp_path / f"relight-{os.geteuid()}" / "sockets" / f"{name}.sock"
    child = os.fork()
    if not child:
        os.setgid(OTHER)
        os.setuid(OTHER)
        try:
            os.stat(path)
            os._exit(1)
        except PermissionError:
            os._exit(0)
        finally:
            os._exit(2)
    assert os.waitpid(child, 0)[1] == 0


def test_a_dead_listener_is_replaced_and_a_live_one_is_not(name: str, tmp_path: Path) -> None:
    """Only one of two agents listens. A killed agent's file is replaced. The end of a forked child removes nothing."""
    with LocalDirectory() as directory:
        first = directory.listen(name, 1)
        with pytest.raises(OSError) as refused:
            directory.listen(name, 1)
        assert refused.value.errno == errno.EADDRINUSE
        if not (child := os.fork()):
            first.close()
            os._exit(0)
        os.waitpid(child, 0)
        directory.connect(name, 1.0).close()
        first.socket.close()  # as if it had been killed: the file stays
        with pytest.raises(ConnectionRefusedError):
            directory.connect(name, 1.0)
        second = directory.listen(name, 1)
        first.close()
        directory.connect(name, 1.0).close()
        second.close()
        assert sorted(os.listdir(directory.fd)) == ["lock", "secret"]
        dead = [directory.listen(name_of(str(number)), 1) for number in range(3)]
        for listener in dead[:2]:
            listener.socket.close()
        for listener in dead[1:]:
            os.utime(f"{directory.path}/{listener.name}.sock", (1, 1))
        os.mkdir(f"{directory.path}/{name_of('9')}.sock")
        (Path(directory.path) / "mine.sock").write_text("not a socket of ours")
        directory.listen(name, 1).close()
        left = {f"{dead[0].name}.sock", f"{dead[2].name}.sock", f"{name_of('9')}.sock", "mine.sock", "lock", "secret"}
        assert set(os.listdir(directory.fd)) == left  # only the old one that no process listens at is removed
        dead[2].close()


def test_a_secret_that_was_tidied_away_is_made_again(agent: server.AgentServer) -> None:
    """The agent reads it at each connection, so a cleaner of old files does not part it from its trainers."""
    with LocalDirectory() as directory:
        first = directory.secret()
        os.unlink("secret", dir_fd=directory.fd)
        launch.connect("store", "run").close()
        assert directory.secret() != first


def test_a_name_cannot_leave_the_directory() -> None:
    """Names that another rank sends are of one form: no path is made of others."""
    with LocalDirectory() as directory, pytest.raises(ValueError, match="is not a name"):
        directory.connect("../../etc/x", 1.0)


def test_descriptors_that_arrive_unasked_are_closed() -> None:
    """No message of a trainer brings descriptors, and of the agent's only two do: any others are closed, however they come."""
    ours, theirs = socket.socketpair()
    fd = os.memfd_create("x")
    wire, sender = AgentConnection[ToAgent](ours, ToAgent), AgentConnection[ToTrainer](theirs, ToTrainer)
    before = open_descriptors()
    sender.send(ListHeld(), [fd] * 20)
    assert wire.receive() == (ListHeld(), [])
    assert not new_descriptors(before)
    wire.close()
    sender.close()

    ours, theirs = socket.socketpair()
    ends = {ours.fileno(), theirs.fileno()}
    agent, sender = Agent(ours), AgentConnection[ToTrainer](theirs, ToTrainer)
    before = open_descriptors()
    sender.send(ForwardedEvent("save.durable", "x", {}), [fd] * 3)
    sender.send(SaveResult(1, "a"), [fd] * 3)
    sender.send(PeerAddress("a", "b"), [fd] * 3)
    assert agent._answer(PeerAddress, 5.0)[0].id == "a"
    assert not new_descriptors(before)
    sender.send(HeldList([]), [fd] * 3)  # an answer that no call takes
    with agent._changed:
        agent._changed.wait_for(lambda: agent._answers, 5.0)
    agent.close()
    sender.close()
    assert not new_descriptors(before)
    assert ends <= {each.number for each in before - open_descriptors()}

    ours, theirs = socket.socketpair()
    end = ours.fileno()
    flooded = AgentConnection[ToTrainer](ours, ToTrainer, (HeldList,))
    before = open_descriptors()
    for _ in range(2):
        socket.send_fds(theirs, [b"\xff"], [fd] * 200)
    with pytest.raises(ConnectionLost, match="descriptors"):
        flooded.receive()
    flooded.close()
    assert not new_descriptors(before)
    assert end in {each.number for each in before - open_descriptors()}
    theirs.close()
    os.close(fd)


def test_both_ends_of_a_proof_agree() -> None:
    """Ends with the same secret prove it to each other. A silent end is awaited no longer than the timeout."""
    ours, theirs = socket.socketpair()
    thread = threading.Thread(target=prove_as_listener, args=(theirs, b"s" * 32, "name", 5.0))
    thread.start()
    prove_as_caller(ours, b"s" * 32, "name", 5.0)
    thread.join()
    with pytest.raises(TimeoutError):
        prove_as_caller(ours, b"s" * 32, "name", 0.1)
    ours.close()
    theirs.close()


@pytest.fixture
def tops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """Two candidate directories."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    monkeypatch.setattr(local_sockets, "_tops", lambda: [str(first), str(second)])
    return str(first), str(second)


def fails_in(top: str, call: Callable[..., object], code: int) -> Callable[..., object]:
    """Return ``call`` that fails with ``code`` if its first argument is a descriptor in ``top``. With code 0 it writes
    less."""

    def failing(fd: int, *rest: object) -> object:
        if os.readlink(f"/proc/self/fd/{fd}").startswith(top):
            if code == 0:
                return 5
            raise OSError(code, os.strerror(code))
        return call(fd, *rest)

    return failing


CODES = [errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EPERM, errno.EACCES]


@pytest.mark.parametrize(
    ("call", "code"), [*[("write", code) for code in CODES], ("write", 0), ("fsync", errno.ENOSPC)]
)
def test_a_candidate_counts_once_its_secret_is_there(
    tops: tuple[str, str], monkeypatch: pytest.MonkeyPatch, call: str, code: int
) -> None:
    """A directory in which the secret cannot be made is not used: the next one is, and without one the reason is stated at once."""
    monkeypatch.setattr(os, call, fails_in(tops[0], getattr(os, call), code))
    with LocalDirectory() as directory:
        assert directory.path.startswith(tops[1]) and len(directory.secret()) == 32
    monkeypatch.setattr(local_sockets, "_tops", lambda: [tops[0]])
    gc.collect()
    before = open_descriptors()
    with pytest.raises(
        StoreUnavailable, match=f"{tops[0]}/.*/secret cannot be read or made \\({os.strerror(code or errno.ENOSPC)}"
    ):
        launch.connect("store", "run")
    assert not new_descriptors(before)
    assert os.listdir(f"{tops[0]}/relight-{os.geteuid()}/sockets") == ["lock"]


def test_a_directory_on_a_read_only_file_system_is_not_used(
    tops: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A directory that was usable before its file system was mounted read-only gives way to the next one."""
    with LocalDirectory() as directory:
        assert directory.path.startswith(tops[0])
    fstatvfs = os.fstatvfs
    read_only = SimpleNamespace(f_flag=os.ST_RDONLY)
    monkeypatch.setattr(
        os, "fstatvfs", lambda fd: read_only if os.readlink(f"/proc/self/fd/{fd}").startswith(tops[0]) else fstatvfs(fd)
    )
    with LocalDirectory() as directory:
        assert directory.path.startswith(tops[1])


@pytest.mark.parametrize("malformed", [b"", b"x" * 31, b"x" * 64])
def test_a_malformed_secret_is_replaced(agent: server.AgentServer, malformed: bytes) -> None:
    """A secret of another length, as a power loss may leave it, is made again, and all processes then have the same one."""
    with LocalDirectory() as directory:
        path = Path(directory.path) / "secret"
        path.write_bytes(malformed)
        secrets: list[bytes] = []
        threads = [threading.Thread(target=lambda: secrets.append(directory.secret())) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(secrets) == 8 and set(secrets) == {path.read_bytes()} and len(secrets[0]) == 32
        assert path.stat().st_mode & 0o777 == 0o600
        path.write_bytes(malformed)
        launch.connect("store", "run").close()


def test_a_secret_is_on_disk_before_it_has_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """After a power loss the secret is complete or absent. No hard link is needed."""
    calls: list[str] = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda fd: (calls.append("fsync"), fsync(fd))[1])
    monkeypatch.setattr(os, "rename", lambda *of, **at: (calls.append("rename"), rename(*of, **at))[1])
    monkeypatch.setattr(os, "link", lambda *_, **__: pytest.fail("a hard link was made"))
    with LocalDirectory():
        assert calls == ["fsync", "rename"]


def test_an_error_of_the_secret_names_the_secret(agent: server.AgentServer) -> None:
    """If the secret cannot be used, the error names its file and no process."""
    with LocalDirectory() as directory:
        os.chmod(f"{directory.path}/secret", 0o640)
        with pytest.raises(
            StoreUnavailable,
            match=r"^connecting to the agent failed: its secret cannot be used: .*/secret is not a file that only",
        ) as caught:
            launch._connect(directory, launch.address_of("store", "run"), 5.0)
    assert "process" not in caught.value.what and "end process" not in (caught.value.hint or "")


def test_candidates_do_not_depend_on_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative TMPDIR is no candidate, nor is the working directory: trainer and agent have different ones."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "scratch").mkdir()
    for name in ("TEMP", "TMP"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TMPDIR", "scratch")
    monkeypatch.setattr(tempfile, "tempdir", None)
    here = TOPS()
    monkeypatch.chdir("/")
    monkeypatch.setattr(tempfile, "tempdir", None)
    assert here == TOPS() and not [top for top in here if top.startswith(str(tmp_path))]
    monkeypatch.setattr(tempfile, "gettempdir", lambda: pytest.fail("it may be the working directory"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "scratch"))
    assert TOPS()[1] == str(tmp_path / "scratch")


def test_the_agent_gets_the_directory_and_checks_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An agent listens in the directory that its trainer passed. It refuses another form of path, and a link."""
    commands: list[list[str]] = []

    def popen(command: list[str], **_: object) -> None:
        commands.append(command)
        raise OSError(errno.EAGAIN, "it need not start here")

    monkeypatch.setattr(launch.subprocess, "Popen", popen)
    with pytest.raises(OSError, match="need not start"):
        launch.connect("store", "run")
    monkeypatch.setattr(local_sockets, "_tops", lambda: pytest.fail("the directory was given"))
    (tmp_path / "link").symlink_to(tmp_path)
    own = f"relight-{os.geteuid()}/sockets"
    command = commands[0]
    assert command[-1] == f"{tmp_path}/{own}"
    for function in ("signal.signal", "faulthandler.enable", "lower_priority"):
        monkeypatch.setattr(f"relight.agent.server.{function}", lambda *_: None)
    monkeypatch.setattr(sys, "argv", command[command.index("relight.agent.server") :])
    listening: list[bool] = []
    monkeypatch.setattr(
        server.AgentServer, "run", lambda _: listening.append(Path(f"{tmp_path}/{own}/{command[-5]}.sock").is_socket())
    )
    assert server.main() == 0 and listening == [True]
    with LocalDirectory(f"{tmp_path}/{own}") as directory:
        assert directory.path == f"{tmp_path}/{own}"
    for path in (str(tmp_path), f"{tmp_path}/link/{own}", f"{tmp_path}/x/../{own}", own, f"{tmp_path}/gone/{own}"):
        with pytest.raises(NotPrivate):
            LocalDirectory(path)


def test_the_next_directory_is_used_if_no_agent_can_listen_in_the_first(
    tops: tuple[str, str], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a directory became full after its secret was made, the next one is used. If all are full, the error names
    them."""
    started: list[str] = []
    monkeypatch.setattr(
        launch,
        "_start",
        lambda *of: (started.append(of[3]), SimpleNamespace(poll=lambda: 4, returncode=launch.UNUSABLE))[1],
    )
    with pytest.raises(
        StoreUnavailable, match=f"no local socket can be made in {tops[0]}.*no local socket can be made in {tops[1]}"
    ):
        launch.connect("store", "run", deadline_s=5.0)
    assert [path.startswith(top) for path, top in zip(started, tops, strict=True)] == [True, True]
    with LocalDirectory(started[1]) as directory:
        listener = directory.listen(name, 4)
    made = server.AgentServer(listener.socket, 60.0, name, started[1])
    thread = threading.Thread(target=made.run, daemon=True)
    thread.start()
    launch.connect("store", "run", deadline_s=5.0).close()
    made.end(0, None)
    thread.join(10)
    listener.close()
