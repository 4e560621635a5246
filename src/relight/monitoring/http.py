"""One small page for Prometheus: ``/metrics``, and ``/healthz``. On loopback unless told otherwise; it takes no input."""

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
"""Connections at a time. One more closes the one whose client this server has waited for longest: for a request, or to read an answer."""


def make_server(collector: Collector, address: str, hosts: Sequence[str] = ()) -> ThreadingHTTPServer:
    """Bound, not serving yet. ``ConfigError`` for what is no address, or is taken. ``hosts``: names of this server, beside addresses,
    ``localhost`` and the machine's own name."""
    host, port = parse_address(address)
    names = {"localhost", socket.gethostname().lower(), *(name.lower() for name in hosts)}

    class Page(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version, sys_version = "relight", ""

        def do_GET(self) -> None:  # the name that http.server calls
            """One page, or 404."""
            self.server.mark(self.request, busy=True)  # type: ignore[attr-defined] # of our own server
            path = self.path.partition("?")[0]
            if not is_host([one.strip() for one in self.headers.get_all("host") or []], names):
                self._answer(400, b"unknown host name: relight metrics --host NAME permits it\n")
            elif path == "/metrics":
                self._answer(200, collector.text(), CONTENT_TYPE)
            elif path in ("/healthz", "/readyz"):
                self._answer(200, b"ok\n")
            else:
                self._answer(404, b"/metrics is here\n")

        def log_message(self, format: str, *args: Any) -> None:
            """Nothing: a scrape is no news."""

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
            """Open connections, and whether the server makes an answer for each; those that wait for their client longest come first."""
            self._lock = threading.Lock()

        def verify_request(self, request: Any, client_address: Any) -> bool:
            """Return whether there is room. The connection that waits for its client longest is closed to make some."""
            with self._lock:
                if len(self.open) >= CONNECTIONS_MAX:
                    oldest = next((one for one, busy in self.open.items() if not busy), None)
                    if oldest is None:
                        return False
                    del self.open[oldest]
                    with contextlib.suppress(OSError):
                        oldest.shutdown(socket.SHUT_RDWR)
                self.open[request] = False
                return True

        def mark(self, request: Any, busy: bool) -> None:
            """Note that the server works on a connection's answer, or waits for its client from now on."""
            with self._lock:
                if request in self.open:
                    self.open[request] = busy
                    self.open.move_to_end(request)

        def shutdown_request(self, request: Any) -> None:
            """The connection ends."""
            with self._lock:
                self.open.pop(request, None)
            super().shutdown_request(request)

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Somebody hung up: nothing to tell."""

    try:
        return Server((host, port), Page)
    except OSError as error:
        raise ConfigError(f"cannot listen there: {error.strerror or error}", where=address) from None


def serve(collector: Collector, address: str, say: Callable[[str], None], hosts: Sequence[str] = ()) -> None:
    """Until Ctrl-C."""
    with make_server(collector, address, hosts) as server:
        host, port = server.server_address[:2]
        say(f"metrics are at http://{_shown(str(host))}:{port}/metrics; Ctrl-C ends it")
        server.serve_forever()


def is_host(headers: Sequence[str], names: Iterable[str]) -> bool:
    """Return whether a request means this server: one Host, which is an address or one of ``names``. Other names may be made to point here
    by a web page's owner (DNS rebinding)."""
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
    """``HOST:PORT``, or a port of 127.0.0.1; ``ConfigError`` for what is neither."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") or "127.0.0.1"
    if not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ConfigError(f"{text[:80]!r} is no HOST:PORT", hint="127.0.0.1:9464, for instance")
    if host != "localhost":
        try:
            ipaddress.ip_address(host)
        except ValueError:
            raise ConfigError(f"{host[:80]!r} is no address of this machine", hint="127.0.0.1:9464, for instance") from None
    return host, int(port)


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host
