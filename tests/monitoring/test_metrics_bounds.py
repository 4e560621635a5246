"""``relight metrics --listen`` among hostile clients: which names it answers to, and how many connections it holds."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from relight.monitoring.exposition import Collector
from relight.monitoring.http import CONNECTIONS_MAX, make_server


@pytest.fixture
def port() -> Iterator[int]:
    """A server of no runs, that knows the name ``node7``."""
    with make_server(Collector(lambda now: []), "127.0.0.1:0", ["Node7"]) as server:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def ask(port: int, host: str | None) -> int:
    """Return the status of one scrape."""
    with socket.create_connection(("127.0.0.1", port), timeout=5) as connection:
        connection.sendall(
            b"GET /metrics HTTP/1.1\r\n" + (f"Host: {host}\r\n".encode() if host is not None else b"") + b"\r\n"
        )
        return int(connection.recv(200).split()[1])


def test_a_name_that_points_here_by_foreign_dns_is_refused(port: int) -> None:
    """A request with a foreign name is refused: a web page's owner could point the name at this address (rebinding)."""
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "", None):
        assert ask(port, host) == 400, host
    for host in (f"127.0.0.1:{port}", "localhost", "[::1]:9464", "node7:9464", socket.gethostname()):
        assert ask(port, host) == 200, host


def test_idle_connections_do_not_keep_a_scraper_out(port: int) -> None:
    """Connections are bounded. The oldest without a complete request is closed for a new one, which is answered at
    once."""
    others = set(threading.enumerate())  # of other tests' servers
    with ExitStack() as stack:
        connections = [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            for _ in range(3 * CONNECTIONS_MAX)
        ]
        for connection in connections:
            connection.sendall(b"GET /metrics HTTP/1.1\r\n")
        assert ask(port, "localhost") == 200
        connections[0].settimeout(5)
        assert connections[0].recv(1) == b"", "the oldest was closed"
        workers = [
            thread
            for thread in threading.enumerate()
            if "process_request_thread" in thread.name and thread not in others
        ]
        assert len(workers) <= CONNECTIONS_MAX + 4


class Long(Collector):
    """An answer that no socket's buffers hold."""

    def text(self) -> bytes:
        """Return 20 MB."""
        return b"x" * (20 << 20)


def test_clients_that_do_not_read_their_answer_keep_no_scraper_out() -> None:
    """For a new connection, the one that has left its answer unread for longest is closed."""
    with make_server(Long(lambda now: []), "127.0.0.1:0") as server, ExitStack() as stack:
        threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
        port = server.server_address[1]
        for _ in range(CONNECTIONS_MAX):
            connection = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5))
            connection.sendall(b"GET /metrics HTTP/1.0\r\nhost: localhost\r\n\r\n")
        ends = time.monotonic() + 5
        while len(server.open) < CONNECTIONS_MAX or any(server.open.values()):  # type: ignore[attr-defined]
            assert time.monotonic() < ends
            time.sleep(0.02)
        for _ in range(3):
            assert ask(port, "localhost") == 200
        server.shutdown()
