"""Login while other clients hold requests: half-sent bodies, wrong tokens, and pages without credentials."""

from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from tests.serve.made_server import FREE, serving
from tests.serve.made_stores import make_store

from relight.serve.app import ServerSettings, create_app
from relight.serve.auth_middleware import AccessRules
from relight.serve.gate import Gate, bounds_of
from relight.serve.slots import MOST, OF_ANONYMOUS, WAITING_MAX, StreamSlots

WRONG = f"rl_aaaaaaaaaa.{'A' * 43}"


class Site:
    """A server on loopback with the gate of ``relight serve``."""

    def __init__(self, root: Path) -> None:
        self.app = create_app(
            ServerSettings([str(make_store(root / "runs", 1, 1))], root / "serve.sqlite", rules=AccessRules())
        )
        self.token = self.app.state.store.new_token("anna", "viewer")[1]
        gate = Gate(bounds_of(1024, 32))
        listening = gate.listen(("127.0.0.1", 0))
        self.port = listening[0].getsockname()[1]
        config = uvicorn.Config(
            self.app, loop="asyncio", http=gate.protocol(), log_level="critical", ws="none", timeout_graceful_shutdown=1
        )
        self.server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self.server.run, kwargs={"sockets": list(listening)})
        self._thread.start()
        ends = time.monotonic() + 30
        while not self.server.started and time.monotonic() < ends:
            time.sleep(0.02)

    def send(self, data: bytes, host: str) -> socket.socket:
        """Open a connection from that address, and send ``data``."""
        connection = socket.create_connection(("127.0.0.1", self.port), timeout=20, source_address=(host, 0))
        connection.sendall(data)
        return connection

    def form(self, token: str, length: int = 0) -> bytes:
        """Return a request with the login form. With ``length`` its body is not complete."""
        body = f"token={token}".encode()
        head = f"POST /login HTTP/1.1\r\nhost: 127.0.0.1:{self.port}\r\norigin: http://127.0.0.1:{self.port}\r\nconnection: close\r\n"
        head += f"content-type: application/x-www-form-urlencoded\r\ncontent-length: {length or len(body)}\r\n\r\n"
        return head.encode() + body

    def status(self, data: bytes, host: str = "127.0.0.9") -> tuple[int, float]:
        """Send ``data``. Return the status of the answer, and the seconds."""
        began = time.monotonic()
        with self.send(data, host) as connection:
            return int(connection.recv(200).split()[1]), time.monotonic() - began

    def close(self) -> None:
        """End the server."""
        self.server.should_exit = True
        self._thread.join(30)


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    """Yield a server, and end it afterwards."""
    made = Site(tmp_path)
    yield made
    made.close()


def test_half_sent_bodies_keep_no_client_from_logging_in(site: Site) -> None:
    """A slow sender holds only its connection, for any address that it posts to."""
    connections = [site.send(site.form("", 60), f"127.0.0.{5 + n % 3}") for n in range(24)]
    connections += [
        site.send(site.form("", 60).replace(b"/login", b"/api/v1/actions/tag"), "127.0.0.5") for _ in range(12)
    ]
    time.sleep(0.2)
    status, seconds = site.status(site.form(site.token))
    assert status == 303 and seconds < 2
    assert site.status(b"GET /login HTTP/1.1\r\nhost: localhost\r\n\r\n")[0] == 200
    for connection in connections:
        connection.close()


def test_delayed_wrong_tokens_keep_no_client_from_logging_in(site: Site) -> None:
    """The delay of a wrong token in the form holds no slot, so others log in meanwhile."""
    over = threading.Event()

    async def sleep(seconds: float) -> None:
        while not over.is_set():
            await asyncio.sleep(0.02)

    site.app.state.failures._sleep = sleep  # noqa: SLF001
    connections = [site.send(site.form(WRONG), f"127.0.0.{n}") for n in (5, 5, 5, 6, 7, 8) for _ in range(4)]
    time.sleep(0.3)
    status, seconds = site.status(site.form(site.token))
    assert status == 303 and seconds < 2
    over.set()
    for connection in connections:
        connection.close()


def test_requests_without_credentials_are_refused_before_their_body(tmp_path: Path) -> None:
    """Only login accepts a body without credentials, and only a small one. Other such requests take no slot."""
    with serving([make_store(tmp_path / "runs", 1, 1)], tmp_path, FREE) as server:
        slots = {
            path: server.client.post(path, headers={"origin": "http://127.0.0.1:8484"}, json={}).status_code
            for path in ("/act/tag", "/logout")
        }
        assert slots == {"/act/tag": 401, "/logout": 401}
        for path in ("/api/v1/runs", "/nowhere", "/events"):
            assert server.client.get(path).status_code == 401, path
        large = {"origin": "http://127.0.0.1:8484", "content-type": "application/x-www-form-urlencoded"}
        assert server.client.post("/login", headers=large, content=b"token=" + b"a" * 5000).status_code == 413
        assert (
            server.client.get("/", headers={"accept": "text/html"}, follow_redirects=False).headers["location"]
            == "/login"
        )


def test_one_client_without_credentials_never_has_the_last_slot() -> None:
    """Clients without credentials share few slots and places. One of them cannot take all, nor those of tokens."""

    async def play() -> None:
        slots = StreamSlots()
        first = [asyncio.create_task(slots.take("anonymous 1")) for _ in range(OF_ANONYMOUS + 2)]
        await asyncio.sleep(0)
        assert sum(request.done() for request in first) == OF_ANONYMOUS - 1
        assert await slots.take("anonymous 2")
        rest = [asyncio.create_task(slots.take(f"anonymous {n}")) for n in range(3, 3 + WAITING_MAX)]
        await asyncio.sleep(0)
        assert any(request.done() and not request.result() for request in rest), (
            "clients without credentials do not fill the queue"
        )
        busy = [asyncio.create_task(slots.take(f"token {n}")) for n in range(MOST - OF_ANONYMOUS)]
        await asyncio.sleep(0)
        last = asyncio.create_task(slots.take("token last"))
        await asyncio.sleep(0)
        assert all(request.done() for request in busy) and not last.done(), "a token waits for its turn"
        slots.give("token 0")
        assert await last
        for request in [*first, *rest, *busy]:
            request.cancel()
        await asyncio.gather(*first, *rest, *busy, return_exceptions=True)

    asyncio.run(play())
