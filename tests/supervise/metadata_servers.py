"""Metadata servers that follow a script: real servers; each speaks HTTP well or badly in one way."""

from __future__ import annotations

import contextlib
import json
import secrets
import socket
import socketserver
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from email.utils import formatdate
from typing import NamedTuple

TTL, TOKEN = "x-aws-ec2-metadata-token-ttl-seconds", "x-aws-ec2-metadata-token"
ACTION = '{"action": "terminate", "time": "2026-11-28T12:00:00Z"}'
REBALANCE = '{"noticeTime": "2026-11-28T12:00:00Z"}'
FLAVOR = {"Metadata-Flavor": "Google"}
OWN_NAME = "trainer_3"


class Request(NamedTuple):
    """A request, with the names of its headers in lower case."""

    method: str
    path: str
    headers: dict[str, str]


def answer(status: int, body: str = "", **headers: str) -> bytes:
    """Return an answer with its length."""
    head = {"Content-Length": str(len(body.encode())), **{name.replace("_", "-"): headers[name] for name in headers}}
    lines = "".join(f"{name}: {value}\r\n" for name, value in head.items())
    return f"HTTP/1.1 {status} so\r\n{lines}\r\n{body}".encode()


def chunked(*chunks: str) -> bytes:
    """Return an answer in chunks."""
    data = "".join(f"{len(chunk):x}\r\n{chunk}\r\n" for chunk in (*chunks, ""))
    return f"HTTP/1.1 200 so\r\nTransfer-Encoding: chunked\r\n\r\n{data}".encode()


@dataclass
class Script:
    """What a server does. ``play`` sends the answer to a request; ``has_notice`` is whether the notice is published."""

    play: Callable[[Script, Request, socket.socket], bytes | None]
    has_notice: bool = False
    over: threading.Event = field(default_factory=threading.Event)
    requests: list[Request] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    tokens: dict[str, float] = field(default_factory=dict)
    """Tokens that were issued, and when they end."""

    def notice(self, text: str, **headers: str) -> bytes:
        """Return the notice if it is published, else 404."""
        return answer(200, text, **headers) if self.has_notice else answer(404)

    def issue(self, granted_s: int = 21600, lives_s: float | None = None) -> bytes:
        """Return an answer with a new token that states to last ``granted_s``, and lasts ``lives_s``."""
        token = secrets.token_hex(8)
        self.tokens[token] = time.monotonic() + (granted_s if lives_s is None else lives_s)
        return answer(200, token, **{TTL: str(granted_s)})

    def accepts(self, request: Request) -> bool:
        """Return whether the request has a token that has not ended."""
        return self.tokens.get(request.headers.get(TOKEN, ""), 0.0) > time.monotonic()


@contextlib.contextmanager
def serving(script: Script, tls: ssl.SSLContext | None = None) -> Iterator[str]:
    """Serve ``script``. Yield the address."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            with contextlib.suppress(OSError, ValueError):  # the client has ended the connection
                first = self.rfile.readline().decode()
                headers = {}
                while line := self.rfile.readline().decode().strip():
                    name, _, value = line.partition(":")
                    headers[name.lower()] = value.strip()
                method, path, _ = first.split(" ", 2)
                request = Request(method, path, headers)
                script.requests.append(request)
                data = script.play(script, request, self.request)
                if data:
                    script.statuses.append(int(data[9:12]))
                    self.request.sendall(data)

    class Server(socketserver.ThreadingTCPServer):
        allow_reuse_address, daemon_threads, request_queue_size = True, True, 64

    server = Server(("127.0.0.1", 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        script.over.set()
        server.shutdown()
        server.server_close()
        thread.join()


class Case(NamedTuple):
    """One server. ``source`` names a cloud; ``received``: the notice is received; ``why``: words of the one event."""

    source: str
    play: Callable[[Script, Request, socket.socket], bytes | None]
    received: bool = False
    why: str = ""


def _token(
    then: Callable[[Script, Request, socket.socket], bytes | None], **issued: float
) -> Callable[..., bytes | None]:
    """Require a session token, as IMDSv2 does; then do as ``then``."""

    def play(script: Script, request: Request, connection: socket.socket) -> bytes | None:
        if request.method == "PUT":
            assert request.path == "/latest/api/token" and request.headers[TTL] == "21600"
            return script.issue(**issued)  # type: ignore[arg-type]
        return then(script, request, connection) if script.accepts(request) else answer(401)

    return play


def _action(script: Script, request: Request, connection: socket.socket) -> bytes | None:
    if request.path == "/latest/meta-data/instance-id":
        return answer(200, "i-0123456789")
    return script.notice(ACTION)


def _version_1(status: int) -> Callable[..., bytes | None]:
    """Have no session tokens, and answer with ``status`` at their address."""

    def play(script: Script, request: Request, connection: socket.socket) -> bytes | None:
        return answer(status) if request.method == "PUT" else _action(script, request, connection)

    return play


def _becomes_required(script: Script, request: Request, connection: socket.socket) -> bytes | None:
    """Have no tokens at first, and require them once there is a notice."""
    return (_token(_action) if script.has_notice else _version_1(404))(script, request, connection)


def _token_answer(data: bytes) -> Callable[..., bytes | None]:
    """Answer with ``data`` at the tokens' address."""
    return lambda script, request, connection: data if request.method == "PUT" else script.notice(ACTION)


def _once(data: bytes) -> Callable[..., bytes | None]:
    """Answer with ``data`` to each request with a token."""
    return _token(lambda script, request, connection: data)


def _silent(script: Script, request: Request, connection: socket.socket) -> None:
    script.over.wait()


def _silent_token(script: Script, request: Request, connection: socket.socket) -> bytes | None:
    return _silent(script, request, connection) if request.method == "PUT" else answer(401)


def _slow(script: Script, request: Request, connection: socket.socket) -> bytes | None:
    script.over.wait(0.4)
    return _token(_action)(script, request, connection)


def drips(data: bytes) -> Callable[..., None]:
    """Send ``data`` one byte at a time, before any of the client's waits for a byte ends."""

    def play(script: Script, request: Request, connection: socket.socket) -> None:
        for byte in data:
            if script.over.wait(0.2):
                return
            connection.sendall(bytes([byte]))

    return play


def _endless(script: Script, request: Request, connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 so\r\n\r\n")
    while not script.over.is_set():
        connection.sendall(b"x" * 65536)


def _google(words: Callable[[Script], str]) -> Callable[..., bytes | None]:
    """Answer as Google's server does, only to requests with its header."""

    def play(script: Script, request: Request, connection: socket.socket) -> bytes | None:
        is_right = request.headers.get("metadata-flavor") == "Google"
        return answer(200, words(script), **FLAVOR) if is_right else answer(403, **FLAVOR)

    return play


def _restarts(script: Script, request: Request, connection: socket.socket) -> bytes | None:
    """Be out of service for one request in three."""
    if len(script.requests) % 3 == 0:
        return answer(503)
    return _google(lambda script: "TRUE" if script.has_notice else "FALSE")(script, request, connection)


def _azure(
    kind: str, after_s: float = 30.0, machine: str = OWN_NAME, name_status: int = 200
) -> Callable[..., bytes | None]:
    """Answer as Azure's server does; once there is a notice, with an event of a machine of the scale set."""
    event = {
        "EventId": "1", "EventType": kind, "ResourceType": "VirtualMachine", "Resources": ["trainer_1", machine],
        "EventStatus": "Scheduled", "NotBefore": formatdate(time.time() + after_s, usegmt=True),
    }  # fmt: skip

    def play(script: Script, request: Request, connection: socket.socket) -> bytes | None:
        if request.headers.get("metadata") != "true":
            return answer(400)
        if request.path.startswith("/metadata/instance/compute/name?api-version="):
            return answer(name_status, OWN_NAME)
        assert request.path == "/metadata/scheduledevents?api-version=2020-07-01"
        return answer(200, json.dumps({"DocumentIncarnation": 1, "Events": [event] if script.has_notice else []}))

    return play


def _text(data: bytes) -> Callable[..., bytes | None]:
    return lambda script, request, connection: data if script.has_notice else answer(404)


CASES = {
    "IMDSv2": Case("aws", _token(_action), received=True),
    "IMDSv2, tokens of a second": Case("aws", _token(_action, granted_s=1), received=True),
    "IMDSv2, tokens end too early": Case("aws", _token(_action, lives_s=0.5), received=True),
    "IMDSv2, slow": Case("aws", _slow, received=True),
    "IMDSv2, chunked": Case(
        "aws", _token(lambda script, *_: chunked(ACTION[:9], ACTION[9:]) if script.has_notice else answer(404)), received=True
    ),
    "IMDSv1, tokens are 403": Case("aws", _version_1(403), received=True),
    "IMDSv1, tokens are 404": Case("aws", _version_1(404), received=True),
    "IMDSv1, tokens are 405": Case("aws", _version_1(405), received=True),
    "IMDSv1, then IMDSv2": Case("aws", _becomes_required, received=True),
    "rebalance": Case("aws-rebalance", _token(lambda script, *_: script.notice(REBALANCE)), received=True),
    "tokens fail": Case("aws", _token_answer(answer(500)), why="HTTP status 500 of the session token"),
    "tokens are silent": Case("aws", _silent_token, why="no answer within 2 s"),
    "tokens are elsewhere": Case("aws", _token_answer(answer(302, Location="/login")), why="a redirect to /login"),
    "tokens are empty": Case("aws", _token_answer(answer(200)), why="an invalid session token"),
    "tokens are binary": Case("aws", _token_answer(answer(200, "a\x01b")), why="an invalid session token"),
    "tokens are refused": Case("aws", lambda script, request, _: script.issue() if request.method == "PUT" else answer(401), why="HTTP status 401"),
    "disabled": Case("aws", lambda *_: answer(403), why="HTTP status 403"),
    "another cloud's": Case("aws", lambda *_: answer(404), why="another server"),
    "garbage": Case("aws", _once(answer(200, '{"action": ')), why="valid JSON"),
    "nested": Case("aws", _once(answer(200, "[" * 60_000)), why="valid JSON"),
    "a page": Case("aws", _once(answer(200, "<html>log in</html>")), why="valid JSON"),
    "another object": Case("aws", _once(answer(200, '{"error": "x"}')), why="no 'action'"),
    "a redirect": Case("aws", _once(answer(307, Location="http://198.51.100.1/")), why="a redirect to http://198.51.100.1/"),
    "ends in its answer": Case("aws", _once(answer(200, ACTION).replace(b"Length: ", b"Length: 9")), why="before the end"),
    "ends in a chunk": Case("aws", _once(chunked(ACTION)[:-9]), why="before the end"),
    "not a chunk": Case("aws", _once(chunked(ACTION).replace(b"\r\n\r\n", b"\r\n\r\nzz")), why="before the end"),
    "ends at once": Case("aws", lambda *_: None, why="without a valid answer"),
    "not HTTP": Case("aws", lambda *_: b"SSH-2.0-OpenSSH_9.2\r\n", why="without a valid answer"),
    "silent": Case("aws", _silent, why="no answer within 2 s"),
    "drips headers": Case("aws", drips(b"HTTP/1.1 200 so\r\n" + b"X: y\r\n" * 500), why="no answer within 2 s"),
    "drips a body": Case("aws", _token(drips(answer(200, ACTION + " " * 500))), why="no answer within 2 s"),
    "huge": Case("aws", _once(answer(200, " " * (4 << 20) + ACTION)), why="longer than 64 kB"),
    "endless": Case("aws", _token(_endless), why="longer than 64 kB"),
    "many headers": Case("aws", _once(b"HTTP/1.1 200 so\r\n" + b"X: y\r\n" * 500 + b"\r\n"), why="headers"),
    "preempted": Case("gcp", _google(lambda script: "TRUE" if script.has_notice else "FALSE"), received=True),
    "out of service at times": Case("gcp", _restarts, received=True),
    "out of service": Case("gcp", lambda *_: answer(503), why="HTTP status 503"),
    "no such address": Case("gcp", lambda *_: answer(404, **FLAVOR), why="HTTP status 404"),
    "not Google's": Case("gcp", lambda *_: answer(200, "TRUE"), why="another server"),
    "another word": Case("gcp", _google(lambda script: "PERHAPS"), why="neither TRUE nor FALSE"),
    "maintenance": Case("gcp-maintenance", _google(lambda script: "TERMINATE_ON_HOST_MAINTENANCE" if script.has_notice else "NONE"), received=True),
    "live migration": Case("gcp-maintenance", _google(lambda script: "MIGRATE_ON_HOST_MAINTENANCE")),
    "Preempt": Case("azure", _azure("Preempt"), received=True),
    "Terminate": Case("azure", _azure("Terminate", 900.0), received=True),
    "Redeploy, soon": Case("azure", _azure("Redeploy", 60.0), received=True),
    "Reboot, later": Case("azure", _azure("Reboot", 900.0), why="Reboot at"),
    "Freeze": Case("azure", _azure("Freeze")),
    "of another machine": Case("azure", _azure("Preempt", machine="trainer_4")),
    "of a machine without a name": Case("azure", _azure("Preempt", machine="trainer_4", name_status=500), received=True),
    "an old version": Case("azure", lambda *_: answer(400), why="HTTP status 400"),
    "an address": Case("", _text(answer(200, "it ends")), received=True),
    "an address of AWS": Case("/latest/meta-data/spot/termination-time", _token(lambda script, *_: script.notice("2026-11-28")), received=True),
    "an address with binary data": Case("", _text(answer(200, "a\x00b")), why="binary data"),
}  # fmt: skip
