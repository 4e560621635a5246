"""Plain ``GET /healthz`` requests are answered when their connection is accepted; all other requests are routed."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.serve.made_server import FREE
from tests.serve.test_serve_storm import BOUNDS, Running

from relight.serve import gate as serve_gate
from relight.serve.auth_middleware import AccessRules, security_headers
from relight.serve.gate import Gate
from relight.serve.probes import PROBE_BYTES_MAX, ProbeResponder

PLAIN = b"GET /healthz HTTP/1.1\r\nHost: localhost:8484\r\nUser-Agent: kube-probe/1.31\r\nAccept: */*\r\nConnection: close\r\n\r\n"
ROUTED = {
    "no bytes": b"",
    "TLS": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    "part of a request": PLAIN[:-2],
    "no end of a line": b"GET /healthz HTTP/1.1\r\nhost: localhost\r\n",
    "two requests": PLAIN + PLAIN,
    "another path": PLAIN.replace(b"/healthz", b"/readyz"),
    "a longer path": PLAIN.replace(b"/healthz", b"/healthz/"),
    "a query": PLAIN.replace(b"/healthz", b"/healthz?token=rl_a"),
    "another method": PLAIN.replace(b"GET", b"POST"),
    "HTTP/1.0": PLAIN.replace(b"HTTP/1.1", b"HTTP/1.0"),
    "a foreign host": PLAIN.replace(b"localhost:8484", b"evil.example"),
    "no host": PLAIN.replace(b"Host: localhost:8484\r\n", b""),
    "two hosts": PLAIN.replace(b"Accept: */*", b"host: localhost"),
    "credentials": PLAIN.replace(b"Accept: */*", b"Authorization: Bearer rl_a"),
    "a cookie": PLAIN.replace(b"Accept: */*", b"Cookie: relight=a"),
    "a body": PLAIN.replace(b"Accept: */*", b"Content-Length: 3") + b"abc",
    "a folded header": PLAIN.replace(b"Accept: */*", b"Accept: a\r\n b"),
    "a control character": PLAIN.replace(b"*/*", b"\x00"),
    "a long request": PLAIN.replace(b"*/*", b"a" * PROBE_BYTES_MAX),
}


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Running]:
    """Yield a real server that answers probes at once."""
    server = Running(tmp_path)
    server.gate.answers_probe = ProbeResponder(FREE).respond
    yield server
    server.close()


def whole_answer(connection: socket.socket) -> tuple[bytes, dict[str, str], bytes]:
    """Return status line, headers and body of an answer.

    Raise ``ConnectionResetError`` if the connection is not closed in order.
    """
    data = b""
    while received := connection.recv(4096):
        data += received
    head, _, body = data.partition(b"\r\n\r\n")
    status, *lines = head.split(b"\r\n")
    pairs = [line.decode().split(": ", 1) for line in lines]
    return status, {name.lower(): value for name, value in pairs}, body


def test_a_probe_has_the_answer_of_the_route_and_takes_no_place(running: Running) -> None:
    """Status, headers and body are equal, and the gate has admitted only the routed request."""
    with running.connect(PLAIN) as client:
        status, headers, body = whole_answer(client)
    deadline = time.monotonic() + 5.0
    while not running.gate.probes and time.monotonic() < deadline:  # counted by the server's thread after the answer
        time.sleep(0.01)
    assert (running.gate.probes, running.gate.accepted) == (1, 0)
    with running.connect(PLAIN.replace(b"Accept: */*", b"X-Routed: 1")) as client:
        routed = whole_answer(client)
    assert (running.gate.probes, running.gate.accepted) == (1, 1)
    assert headers.pop("date").endswith(" GMT") and routed[1].pop("date") and routed[1].pop("server")
    assert (status, headers, body) == routed
    assert security_headers(FREE).items() <= headers.items() and headers["connection"] == "close"


def test_a_probe_that_arrives_in_parts_or_names_a_foreign_host_is_routed(running: Running) -> None:
    """The route answers both: 200 after the last part, and 400."""
    with running.connect(PLAIN[:30]) as client:
        ends = time.monotonic() + 20
        while not running.gate.accepted and time.monotonic() < ends:
            time.sleep(0.01)
        client.sendall(PLAIN[30:])
        assert whole_answer(client)[0] == b"HTTP/1.1 200 OK"
    with running.connect(ROUTED["a foreign host"]) as client:
        assert whole_answer(client)[0] == b"HTTP/1.1 400 Bad Request"
    assert (running.gate.probes, running.gate.accepted) == (0, 2)


@pytest.mark.parametrize("request_bytes", ROUTED.values(), ids=ROUTED.keys())
def test_other_requests_are_left_unread(request_bytes: bytes) -> None:
    """Other requests get no answer here, and the route can read every byte."""
    server, client = socket.socketpair()
    with server, client:
        client.sendall(request_bytes)
        client.setblocking(False)
        assert not ProbeResponder(AccessRules()).respond(server)
        server.setblocking(False)
        with pytest.raises(BlockingIOError):
            client.recv(1)
        if request_bytes:
            assert server.recv(1 << 16) == request_bytes


def test_hosts_and_strict_transport_security_follow_the_rules() -> None:
    """The names of ``--host`` and ``--public`` are this server's. With ``--public`` the answer has HSTS."""
    responder = ProbeResponder(AccessRules(hosts=("relight.lab",), public="https://relight.example"))
    for host in (b"relight.lab", b"RELIGHT.example:443", b"10.0.0.7:8484", b"[::1]"):
        server, client = socket.socketpair()
        with client:
            client.sendall(PLAIN.replace(b"localhost:8484", host))
            with server:
                assert responder.respond(server)
            assert whole_answer(client)[1]["strict-transport-security"] == "max-age=31536000"


def test_probes_close_no_connection_and_are_bounded_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full gate answers probes, but no more of them in a turn of the loop than ``PROBES_MAX``; others are still admitted."""
    monkeypatch.setattr(serve_gate, "PROBES_MAX", 3)
    monkeypatch.setattr(serve_gate, "SILENT_S", 0)

    async def play() -> None:
        gate = Gate(BOUNDS._replace(connections=1))
        gate.answers_probe = ProbeResponder(AccessRules()).respond
        (listening,) = gate.listen(("127.0.0.1", 0))

        def connect(data: bytes) -> socket.socket:
            client = socket.create_connection(listening.getsockname(), timeout=10)
            client.sendall(data)
            return client

        clients = [connect(b"GET / HT")]
        first, _ = listening.accept()
        clients += [connect(PLAIN) for _ in range(8)]
        for answered in (3, 6, 8):
            await asyncio.sleep(0)
            with pytest.raises(BlockingIOError):
                listening.accept()
            assert (gate.probes, len(gate), gate.evicted, gate.refused) == (answered, 1, 0, 0)
        for client in clients[1:]:
            assert whole_answer(client)[2] == b'{"ok":true}'
        await asyncio.sleep(0)
        clients += [connect(PLAIN), connect(b"GET / HT")]
        await asyncio.sleep(0.05)
        admitted, _ = listening.accept()
        assert (gate.probes, gate.accepted, gate.evicted) == (9, 2, 1)
        for connection in (first, admitted, listening, *clients):
            connection.close()

    asyncio.run(play())
