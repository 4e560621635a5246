"""One small page for Prometheus: ``/metrics``, and ``/healthz``. On loopback unless told otherwise; it takes no input."""

from __future__ import annotations

import ipaddress
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from relight.errors import ConfigError
from relight.watch.exposition import CONTENT_TYPE, Collector

REQUEST_S = 10.0


def make_server(collector: Collector, address: str) -> ThreadingHTTPServer:
    """Bound, not serving yet. ``ConfigError`` for what is no address, or is taken."""
    host, port = parse_address(address)

    class Page(BaseHTTPRequestHandler):
        timeout = REQUEST_S
        server_version, sys_version = "relight", ""

        def do_GET(self) -> None:  # the name that http.server calls
            """One page, or 404."""
            path = self.path.partition("?")[0]
            if path == "/metrics":
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
            self.end_headers()
            self.wfile.write(body)

    class Server(ThreadingHTTPServer):
        daemon_threads = True

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Somebody hung up: nothing to tell."""

    try:
        return Server((host, port), Page)
    except OSError as error:
        raise ConfigError(f"cannot listen there: {error.strerror or error}", where=address) from None


def serve(collector: Collector, address: str, say: Callable[[str], None]) -> None:
    """Until Ctrl-C."""
    with make_server(collector, address) as server:
        host, port = server.server_address[:2]
        say(f"metrics are at http://{_shown(str(host))}:{port}/metrics; Ctrl-C ends it")
        server.serve_forever()


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
