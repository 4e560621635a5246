"""Agents that use TLS: a reader of their connections learns nothing, and a process that is not of the job is refused."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from in_process import MB, TOKEN, Events, committed, join, part_of, read_back, restore, several, until
from neighbours import Nursery
from relay import Relay

from relight.comm.tls import TlsConnection, TlsIdentity, TlsRefused, call_tls
from relight.errors import ConfigError
from relight.observe import subscribe
from relight.peers import Remote, sender
from relight.peers.messages import Acknowledged, StatusRequest
from relight.peers.server import HANDSHAKE_S
from relight.peers.wire import PeerLost, answer, call, split_address, without_fingerprint

NAMES = "layers.with-a-name-that-a-reader-knows."
SLACK_S = 8.0
"""More seconds than a limit, on a busy machine."""


def test_a_reader_of_the_connections_learns_nothing(tmp_path: Path, tls: bool) -> None:
    """A save and a restore through recording relays. With TLS, the recorded bytes have no tensor's bytes, no tensor's
    name, no checkpoint's id, no token and no message. Without TLS, the same search finds all but the token."""
    opened, contents, part = committed(tmp_path, NAMES)
    with contextlib.ExitStack() as stack, several(3, tls=tls) as peers:
        relays = [stack.enter_context(Relay(peer.address)) for peer in peers]
        join(peers, 2, 1, [relay.address for relay in relays])
        others = [part_of(part.id, 1, rank, 3 * MB)[0] for rank in (1, 2)]
        for peer, offered in zip(peers, [part, *others]):
            peer.offer(offered)
        assert all(peer.wait(30) for peer in peers)
        with contextlib.closing(Remote([relay.address for relay in relays], TOKEN, 20.0, tls=tls)) as remote:
            assert restore(opened, part, remote) == contents
        peers[0].close()
        with contextlib.closing(Remote([relay.address for relay in relays], TOKEN, 20.0, tls=tls)) as remote:
            assert restore(opened, part, remote) == contents
        streams = [stream for relay in relays for stream in relay.streams()]
    assert sum(map(len, streams)) > 2 * sum(map(len, contents.values()))

    def found(*needles: bytes) -> int:
        return sum(any(needle in stream for stream in streams) for needle in needles)

    samples = [data[len(data) // 2 :][:48] for data in contents.values() if len(data) > 1000]
    assert len(samples) > 10
    assert found(*samples) == (0 if tls else len(samples))
    assert found(NAMES.encode()) == found(part.id.encode()) == found(b"relight-peers-") == (0 if tls else 1)
    assert found(b"Contribute", b"ReadRequest") == (0 if tls else 2)
    assert found(TOKEN) == 0


def test_a_connection_is_used_again() -> None:
    """A hundred reads from one agent take one connection, so one handshake."""
    with several(1, tls=True) as (peer,), Relay(peer.address) as relay:
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        with contextlib.closing(Remote([relay.address], TOKEN, 20.0, tls=True)) as remote:
            for _ in range(50):
                read_back(remote, part, data)
        assert len(relay.recordings) == 1
        # one ClientHello in one record of type 22, and data in records of type 23 after it
        assert relay.recordings[0].sent[:1] == b"\x16"


def stranger_with_tls(address: str) -> None:
    """Complete the handshake, and send a proof of another token."""
    call(address, b"u" * 32, 10.0)


def stranger_without_token(address: str) -> None:
    """Complete the handshake, and send nothing more."""
    with socket.create_connection(split_address(address), 10) as raw:
        stream = call_tls(raw, address.partition("#")[2], time.monotonic() + 10)
        stream.settimeout(HANDSHAKE_S + SLACK_S)
        greeting = memoryview(bytearray(1000))
        assert stream.recv_into(greeting) <= 48
        stream.recv_into(greeting)


def plain_caller(address: str) -> None:
    """Call as an agent without TLS does."""
    call(without_fingerprint(address), TOKEN, 10.0)


def earlier_tls(address: str) -> None:
    """Offer TLS 1.2, and nothing newer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with socket.create_connection(split_address(address), 10) as raw:
        context.wrap_socket(raw)


def half_a_hello(address: str) -> None:
    """Send the beginning of a handshake, a byte now and then."""
    with socket.create_connection(split_address(address), 10) as raw:
        for byte in b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + bytes(100):
            raw.sendall(bytes([byte]))
            time.sleep(0.2)


@pytest.mark.parametrize(
    "attack",
    [stranger_with_tls, stranger_without_token, plain_caller, earlier_tls, half_a_hello],
    ids=lambda f: f.__name__,
)
def test_a_stranger_is_refused_counted_and_reported(attack: Callable[[str], None]) -> None:
    """A caller that does not prove itself is disconnected in time, counted and reported once. Other connections continue."""
    events: Events = []
    with several(1, events, tls=True) as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        with contextlib.closing(Remote([peer.address], TOKEN, 20.0, tls=True)) as remote:
            began = time.monotonic()
            for _ in range(2):
                with pytest.raises((OSError, PeerLost)):
                    attack(peer.address)
                read_back(remote, part, data)
            assert time.monotonic() - began < 2 * (HANDSHAKE_S + SLACK_S)
        assert until(lambda: peer.refused == 2)
        (report,) = [fields for name, fields in events if name == "peers.refused"]
        assert report["address"] == "127.0.0.1" and report["count"] == 1 and report["why"], report


def test_a_replayed_hello_is_refused() -> None:
    """The recorded bytes of a caller that read a part, sent again, get no byte of the part, and are refused."""
    with several(1, tls=True) as (peer,), Relay(peer.address) as relay:
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        with contextlib.closing(Remote([relay.address], TOKEN, 20.0, tls=True)) as remote:
            read_back(remote, part, data)
        (recording,) = relay.recordings
        assert len(recording.received) > MB
        for whole in (True, False):
            with socket.create_connection(split_address(peer.address), 10) as again:
                with contextlib.suppress(ConnectionError):
                    if whole:
                        again.sendall(recording.sent)
                    else:  # in step with the answers, as the first caller sent it
                        again.sendall(recording.sent[:517])
                        again.recv(65536)
                        again.sendall(recording.sent[517:])
                again.settimeout(HANDSHAKE_S + SLACK_S)
                received = b""
                with contextlib.suppress(ConnectionError):
                    while more := again.recv(65536):
                        received += more
                assert len(received) < 4096
        assert until(lambda: peer.refused == 2)
        with contextlib.closing(Remote([peer.address], TOKEN, 20.0, tls=True)) as remote:
            read_back(remote, part, data)


class Impostor:
    """A listener with its own certificate, in the place of an agent. Records what callers send inside the channel."""

    def __init__(self) -> None:
        self.identity = TlsIdentity()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.place = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self.connections, self.received = 0, b""
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listener.accept()
                self.connections += 1
                with connection, contextlib.suppress(OSError):
                    connection.settimeout(10)
                    with self.identity.context.wrap_socket(connection, server_side=True) as stream:
                        stream.sendall(b"relight-peers-1\n" + bytes(32))
                        while more := stream.recv(65536):
                            self.received += more

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()


def test_a_wrong_fingerprint_gets_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A listener with another certificate than the announced one receives no byte inside the channel, from a reader and
    from a sender. Both report it in time, and the other holder gets its copy."""
    monkeypatch.setattr(sender, "PATIENCE_S", 1.0)
    unreachable: list[str] = []
    undo = subscribe(
        lambda event: unreachable.append(str(event.fields["why"])) if event.name == "peers.unreachable" else None
    )
    events: Events = []
    with contextlib.closing(Impostor()) as impostor, several(2, events, tls=True) as peers:
        stolen = f"{impostor.place}#{peers[1].address.partition('#')[2]}"
        with pytest.raises(PeerLost, match="certificate"):
            call(stolen, TOKEN, 10.0, tls=True)
        with contextlib.closing(Remote([stolen], TOKEN, 10.0, tls=True)) as remote:
            assert remote.answered == ()
        assert len(unreachable) == 1 and "certificate" in unreachable[0]
        join(peers, 1, 2, [*(peer.address for peer in peers), stolen])
        part, data = part_of("c1", 1, 0, MB)
        peers[0].offer(part)
        assert peers[0].wait(30)
        failed = [fields for name, fields in events if name == "peers.failed"]
        assert [(item["peer"], "certificate" in str(item["why"])) for item in failed] == [("a2", True)]
        assert failed[0]["address"] == impostor.place
        peers[0].close()
        with contextlib.closing(Remote([peers[1].address], TOKEN, 20.0, tls=True)) as remote:
            read_back(remote, part, data)
        assert impostor.connections >= 3 and impostor.received == b""
    undo()


def test_a_proof_counts_for_one_certificate_only() -> None:
    """A process between two agents, with its own certificate announced in the called agent's place, can pass no proof on:
    the called agent refuses it, and the caller sends nothing more."""
    with contextlib.closing(Impostor()) as impostor, several(1, tls=True) as (peer,):
        impostor._listener.settimeout(20)

        def between() -> None:
            connection, _ = listener.accept()
            with connection, socket.create_connection(split_address(peer.address), 10) as onward:
                inner = impostor.identity.context.wrap_socket(connection, server_side=True)
                outer = call_tls(onward, peer.address.partition("#")[2], time.monotonic() + 10)
                room = memoryview(bytearray(4096))
                with contextlib.suppress(OSError):
                    outer.settimeout(10)
                    inner.sendall(room[: outer.recv_into(room)])
                    outer.sendall(inner.recv(4096))
                    inner.sendall(room[: outer.recv_into(room)])
                inner.close()

        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.settimeout(20)
            thread = threading.Thread(target=between)
            thread.start()
            with pytest.raises(PeerLost):
                call(f"127.0.0.1:{listener.getsockname()[1]}#{impostor.identity.fingerprint}", TOKEN, 10.0, tls=True)
            thread.join(30)
        assert until(lambda: peer.refused == 1)


def test_no_agent_without_a_certificate_is_called() -> None:
    """With TLS, an address without a fingerprint is refused before a connection is made, by a reader and by a sender."""
    events: Events = []
    with several(2, events, tls=True) as peers, socket.create_server(("127.0.0.1", 0)) as plain:
        address = f"127.0.0.1:{plain.getsockname()[1]}"
        with pytest.raises(PeerLost, match="certificate"):
            call(address, TOKEN, 10.0, tls=True)
        with contextlib.closing(Remote([address], TOKEN, 10.0, tls=True)) as remote:
            assert remote.answered == ()
        join(peers, 1, 1, [peers[0].address, address])
        peers[0].offer(part_of("c1", 1, 0, MB)[0])
        assert not peers[0].wait(0.5)
        plain.settimeout(0.2)
        with pytest.raises(TimeoutError):
            plain.accept()


def test_an_agent_changes_between_clear_and_tls() -> None:
    """An agent that stays for the next attempt starts TLS if that one wants it: its address has a fingerprint then, what
    it holds stays, earlier connections are closed, and callers without TLS are refused."""
    with several(1) as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        clear = peer.address
        old = call(clear, TOKEN, 10.0)
        peer.use(True, "tcp")
        assert until(old.ends)
        old.close()
        assert without_fingerprint(peer.address) == clear != peer.address
        with pytest.raises(PeerLost):
            call(clear, TOKEN, 10.0)
        same = peer.address
        peer.use(True, "tcp")
        assert peer.address == same
        with contextlib.closing(Remote([peer.address], TOKEN, 20.0, tls=True)) as remote:
            read_back(remote, part, data)


@pytest.mark.parametrize("seed", range(36))
def test_a_kill_during_a_handshake_leaves_no_hang(nursery: Nursery, seed: int) -> None:
    """One of both agents is killed after a random number of bytes of their handshake. The other one reports it within
    its limit, keeps no thread for it, and serves."""
    rng = random.Random(seed)
    after, of_called = rng.randrange(0, 2600), seed % 2 == 0
    with several(1, tls=True) as (peer,):
        part, data = part_of("c1", 1, 0, MB)
        peer.offer(part)
        other = nursery.agent(TOKEN, tls=True)
        other.call("fill", "c2", 1, [(1, MB)])
        kill = lambda: os.kill(other.pid, signal.SIGKILL)  # noqa: E731
        began = time.monotonic()
        if of_called:
            with Relay(other.address, after, kill) as relay:
                with contextlib.closing(Remote([relay.address], TOKEN, 10.0, tls=True)) as remote:
                    assert len(remote.answered) <= 1
        else:
            with Relay(peer.address, after, kill) as relay:
                roster = [("a0", "h0", "", relay.address, [0]), ("a1", "h1", "", other.address, [1])]
                other.call("join", roster, "a1", 1, 1)
                other.call("offer")
                assert until(lambda: relay._after is None)
                assert until(lambda: not peer._server._threads)
        assert time.monotonic() - began < 10.0 + SLACK_S
        other.close()
        with contextlib.closing(Remote([peer.address], TOKEN, 20.0, tls=True)) as remote:
            read_back(remote, part, data)


def test_a_connection_ends_by_its_own_limit() -> None:
    """A listener that completes the handshake and then sends a record byte by byte is left in time."""
    identity = TlsIdentity()

    def slow() -> None:
        connection, _ = listener.accept()
        with connection, contextlib.suppress(OSError):
            incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
            stream = identity.context.wrap_bio(incoming, outgoing, server_side=True)
            while True:
                try:
                    stream.do_handshake()
                    break
                except ssl.SSLWantReadError:
                    connection.sendall(outgoing.read())
                    incoming.write(connection.recv(65536))
            connection.sendall(outgoing.read())
            stream.write(b"relight-peers-1\n" + bytes(32))
            for byte in outgoing.read():
                connection.sendall(bytes([byte]))
                time.sleep(0.2)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=slow)
        thread.start()
        began = time.monotonic()
        with pytest.raises(PeerLost):
            call(f"127.0.0.1:{listener.getsockname()[1]}#{identity.fingerprint}", TOKEN, 1.5, tls=True)
        assert time.monotonic() - began < 1.5 + SLACK_S
        thread.join(30)


def test_a_connection_with_bytes_that_no_call_requested_is_not_used_again() -> None:
    """A second answer after the requested one ends the connection, also if it was received with the first one."""
    identity = TlsIdentity()

    def answers_twice() -> None:
        raw, _ = listener.accept()
        with raw:
            wire = answer(raw, TOKEN, 10.0, 10.0, identity)
            wire.receive()
            wire.send(Acknowledged(True))
            wire.send(Acknowledged(True))
            with pytest.raises(PeerLost):
                wire.receive()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=answers_twice)
        thread.start()
        wire = call(f"127.0.0.1:{listener.getsockname()[1]}#{identity.fingerprint}", TOKEN, 10.0, tls=True)
        assert not wire.ends()
        wire.send(StatusRequest())
        time.sleep(0.3)  # both answers arrive
        assert wire.receive() == Acknowledged(True)
        assert isinstance(wire._socket, TlsConnection) and wire._socket.has_input and wire.ends()
        wire.close()
        thread.join(30)


def test_a_listener_without_a_handshake_is_refused() -> None:
    """``call_tls`` raises ``TlsRefused`` for a listener that answers in the clear."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as raw:
        connection, _ = listener.accept()
        with connection:
            connection.sendall(b"relight-peers-1\n" + bytes(32))
            with pytest.raises(TlsRefused, match=r"TLS 1\.3"):
                call_tls(raw, 64 * "0", time.monotonic() + 10)


SCRIPT = """
import os, sys
from relight.errors import ConfigError
from relight.comm.tls import TlsIdentity
from relight.keys.dumps import keep_out_of_core_dumps
TlsIdentity()  # imports are done
opened = []
sys.addaudithook(lambda name, args: opened.append(str(args[0])) if name == "open" else None)
if os.geteuid() == 0:
    os.setgid(65534); os.setuid(65534)
keep_out_of_core_dumps(whole=True)
before = os.listdir("/proc/self/fd")
first, second = TlsIdentity(), TlsIdentity()
assert first.fingerprint != second.fingerprint and len(first.fingerprint) == 64
assert os.listdir("/proc/self/fd") == before, "a descriptor is left"
print(opened)
"""


def test_the_private_key_is_in_no_file_of_a_file_system(tmp_path: Path) -> None:
    """An unprivileged process that leaves no core dumps makes its certificates, and opens no file for them but memory."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path), "HOME": str(tmp_path)},
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"
    assert not list(tmp_path.iterdir())


def test_a_missing_library_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the library that makes certificates, TLS is a ``ConfigError`` that names the package to install."""
    monkeypatch.setitem(sys.modules, "cryptography.x509", None)
    with pytest.raises(ConfigError) as raised, several(1, tls=True):
        pass
    assert "relight[encryption]" in raised.value.hint
