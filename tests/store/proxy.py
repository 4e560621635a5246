"""A proxy between a client and an S3-compatible server, which breaks a given request in a given way.

Requests are numbered as they come. Nothing here knows what Relight does with its store.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple

HANG_S = 1.2
"""Longer than the client waits."""
ERROR = (
    '<?xml version="1.0" encoding="UTF-8"?><Error><Code>{}</Code><Message>{}</Message><RequestId>1</RequestId></Error>'
)


class Request(NamedTuple):
    """What the proxy knows of a request when it decides whether to break it."""

    number: int
    method: str
    path: str
    conditional: bool

    @property
    def is_listing(self) -> bool:
        return self.method == "GET" and "list-type=2" in self.path

    @property
    def is_read(self) -> bool:
        return self.method == "GET" and "list-type=2" not in self.path


ANY = ("500", "503", "429", "500 after", "reset", "reset after", "hang", "hang after")
READS = ("truncated", "short", "flipped", "empty")
LISTINGS = ("stale", "nothing listed", "truncated")
CREATIONS = ("409", "412 after")
COMPLETIONS = ("200 error",)


def faults_of(request: Request) -> tuple[str, ...]:
    """Everything that can go wrong with such a request."""
    if request.is_listing:
        return ANY + LISTINGS
    if request.is_read:
        return ANY + READS
    if request.conditional:
        return ANY + CREATIONS
    if request.method == "POST" and "uploadId" in request.path:
        return ANY + COMPLETIONS
    return ANY


class Proxy:
    """``decide`` gives the fault for a request, "" for none. ``seen`` are all requests."""

    def __init__(self, target: str, decide: Callable[[Request], str] = lambda request: "") -> None:
        self.decide = decide
        self.seen: list[Request] = []
        self._lock = threading.Lock()
        host, port = target.removeprefix("http://").split(":")
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"
            disable_nagle_algorithm = True

            def log_message(self, format: str, *args: object) -> None:
                pass

            def handle_one_request(self) -> None:
                with contextlib.suppress(OSError):
                    super().handle_one_request()
                    return
                self.close_connection = True

            def relay(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                with proxy._lock:
                    conditional = self.headers.get("If-None-Match") == "*"
                    request = Request(len(proxy.seen), self.command, self.path, conditional)
                    proxy.seen.append(request)
                fault = proxy.decide(request)
                if fault in ("500", "503", "429", "409"):
                    self.answer(
                        int(fault),
                        ERROR.format({"409": "ConditionalRequestConflict"}.get(fault, "SlowDown"), "injected").encode(),
                    )
                    return
                if fault == "reset":
                    self.close_connection = True
                    return
                if fault == "hang":
                    time.sleep(HANG_S)
                    self.close_connection = True
                    return
                if fault == "200 error":
                    self.answer(200, ERROR.format("InternalError", "injected").encode())
                    return
                headers = {name: value for name, value in self.headers.items() if name.lower() not in ("connection",)}
                if fault == "unconditional":
                    headers = {name: value for name, value in headers.items() if name.lower() != "if-none-match"}
                upstream = http.client.HTTPConnection(host, int(port), timeout=30)
                try:
                    upstream.request(self.command, self.path, body, headers)
                    reply = upstream.getresponse()
                    data = reply.read()
                finally:
                    upstream.close()
                if fault == "500 after":
                    self.answer(500, ERROR.format("InternalError", "injected").encode())
                elif fault == "reset after":
                    self.close_connection = True
                elif fault == "hang after":
                    time.sleep(HANG_S)
                    self.close_connection = True
                elif fault == "412 after":
                    self.answer(412, ERROR.format("PreconditionFailed", "injected").encode())
                else:
                    self.pass_on(reply, data, fault if reply.status < 300 else "")

            def pass_on(self, reply: http.client.HTTPResponse, data: bytes, fault: str) -> None:
                length = len(data)
                if fault == "truncated":
                    data = data[: length // 2]
                    self.close_connection = True
                elif fault == "short":
                    data = data[: length // 2]
                    length = len(data)
                elif fault == "empty":
                    data, length = b"", 0
                elif fault == "flipped" and data:
                    data = (
                        bytes([*data[:-1], data[-1] ^ 1])
                        if len(data) < 9
                        else data[: length // 2] + bytes([data[length // 2] ^ 16]) + data[length // 2 + 1 :]
                    )
                elif fault == "stale":
                    contents = re.findall(rb"<Contents>.*?</Contents>", data, re.DOTALL)
                    if contents:
                        data = data.replace(contents[-1], b"")
                        length = len(data)
                elif fault == "nothing listed":
                    data = re.sub(
                        rb"<Contents>.*?</Contents>|<CommonPrefixes>.*?</CommonPrefixes>", b"", data, flags=re.DOTALL
                    )
                    length = len(data)
                elif fault == "endless":
                    data = re.sub(
                        rb"<IsTruncated>.*?</IsTruncated>",
                        b"<IsTruncated>true</IsTruncated><NextContinuationToken>x</NextContinuationToken>",
                        data,
                    )
                    length = len(data)
                self.send_response_only(reply.status)
                for name, value in reply.getheaders():
                    if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                        self.send_header(name, value)
                self.send_header(
                    "Content-Length", str(length if self.command != "HEAD" else reply.getheader("Content-Length", "0"))
                )
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(data)
                    self.wfile.flush()

            def answer(self, status: int, body: bytes) -> None:
                self.send_response_only(status)
                self.send_header("Content-Type", "application/xml")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(body)

            do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = relay

        class Quiet(ThreadingHTTPServer):
            daemon_threads = True
            request_queue_size = 128

            def handle_error(self, request: object, client_address: object) -> None:
                pass

        self._server = Quiet(("127.0.0.1", 0), Handler)
        self.address = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@contextlib.contextmanager
def proxied(target: str, decide: Callable[[Request], str] = lambda request: "") -> Iterator[Proxy]:
    """Yield a proxy that runs until the end of a test."""
    proxy = Proxy(target, decide)
    try:
        yield proxy
    finally:
        proxy.close()
