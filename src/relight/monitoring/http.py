"""A small HTTP server for Prometheus: ``/metrics`` and ``/healthz``.

It listens on loopback by default, and takes no input.
"""

from __future__ import annotations

import contextlib
import ipaddress
import socket
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from relight.errors import ConfigError
from relight.monitoring.exposition import CONTENT_TYPE, Collector

REQUEST_S = 10.0
CONNECTIONS_MAX = 16
"""Most connections at a time.

A further one closes the connection that has waited longest for its client, to send or to read.
"""


def make_server(collector: Collector, address: str, hosts: Sequence[str] = ()) -> ThreadingHTTPServer:
    """Return a bound server that does not serve yet. Raise ``ConfigError`` if the address is invalid or taken.

    ``hosts``: names of this server in addition to addresses, ``localhost`` and the machine's own name.
    """
    host, port = parse_address(address)
    names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in hosts)}

    class Page(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version, sys_version = "relight", ""

        def do_GET(self) -> None:  # the name that http.server calls
            """Answer with one of the pages, or 404."""
            self.server.mark(self.request, busy=True)  # type: ignore[attr-defined] # of our own server
            path = self.path.partition("?")[0]
            if not is_host([host.strip() for host in self.headers.get_all("host") or []], names):
                self._answer(400, b"unknown host name: relight metrics --host NAME permits it\n")
            elif path == "/metrics":
                self._answer(200, collector.text(), CONTENT_TYPE)
            elif path in ("/healthz", "/readyz"):
                self._answer(200, b"ok\n")
            else:
                self._answer(404, b"/metrics is here\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing: scrapes are frequent."""

        def _answer(self, status: int, body: bytes, kind: str = "text/plain; charset=utf-8") -> None:
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.server.mark(self.request, busy=False)  # type: ignore[attr-defined] # from here on it waits for its client
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.open: OrderedDict[Any, bool] = OrderedDict()
            """Whether the server works on each open connection's answer. The longest wait for a client comes first."""
            self._lock = threading.Lock()

        def verify_request(self, request: Any, client_address: Any) -> bool:
            """Return whether the connection is accepted.

            If there are too many, close the one that waits for its client longest.
            """
            with self._lock:
                if len(self.open) >= CONNECTIONS_MAX:
                    oldest = next((connection for connection, busy in self.open.items() if not busy), None)
                    if oldest is None:
                        return False
                    del self.open[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self.open[request] = False
                return True

        def mark(self, request: Any, busy: bool) -> None:
            """Record that the server works on a connection's answer, or waits for its client from now on."""
            with self._lock:
                if request in self.open:
                    self.open[request] = busy
                    self.open.move_to_end(request)

        def shutdown_request(self, request: Any) -> None:
            """Forget a connection that ends."""
            with self._lock:
                self.open.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Log nothing: a client has closed its connection."""

    try:
        return Server((host, port), Page)
    except OSError as error:
        raise ConfigError(f"cannot listen there: {error.strerror or error}", where=address) from None


def serve(collector: Collector, address: str, report: Callable[[str], None], hosts: Sequence[str] = ()) -> None:
    """Serve until Ctrl-C."""
    with make_server(collector, address, hosts) as server:
        host, port = server.server_address[:2]
        report(f"metrics are at http://{_shown(str(host))}:{port}/metrics; Ctrl-C ends it")
        server.serve_forever()


def is_host(headers: Sequence[str], names: Iterable[str]) -> bool:
    """Return whether a request is meant for this server: it has one Host, which is an address or one of ``names``.

    The owner of a web page can make other names point here (DNS rebinding).
    """
    if len(headers) != 1:
        return False
    host = headers[0].lower()
    name = host[1:].partition("]")[0] if host.startswith("[") else host.rpartition(":")[0] if ":" in host else host
    if name in names:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


def parse_address(text: str) -> tuple[str, int]:
    """Return host and port of ``HOST:PORT``, or of a port alone (127.0.0.1). Raise ``ConfigError`` for another text."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text[:80]!r} is not HOST:PORT", hint="127.0.0.1:9464, for instance")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(
                f"{host[:80]!r} is not an address of this machine", hint="127.0.0.1:9464, for instance"
            ) from None
    return host, int(port)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
