"""Objects of a bucket over HTTP on loopback: for tensorstore, which has no driver for Azure, but one for HTTP.

Invariants: Only a process that knows a random header is answered, and only with objects that the import has listed, in
the version that was listed. Each range is read from the bucket when it is requested.
"""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import threading
import weakref
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote

from relight.comm import new_threads
from relight.errors import RelightError, StoreUnavailable
from relight.importers.files import Files, pread, size_of

_HEADER = "X-Relight-Gateway"
_RANGE = re.compile(r"bytes=(\d{1,18})?-(\d{1,18})?")
_PIECE_BYTES = 16 << 20


class BucketGateway:
    """A server of the objects of ``files``. It ends with them."""

    def __init__(self, files: Files) -> None:
        self._secret = secrets.token_urlsafe(24)
        owner = weakref.ref(files)

        class Handler(_Handler):
            secret = self._secret

            def files_now(self) -> Files | None:
                return owner()

        self._server = _Server(("127.0.0.1", 0), Handler)
        serving = threading.Thread(target=self._server.serve_forever, args=(0.05,), name="relight-gateway", daemon=True)
        if not new_threads.start(serving):
            self._server.server_close()
            raise StoreUnavailable("the system starts no thread to read the bucket for tensorstore", where=files.path)
        self._end = weakref.finalize(files, _end, self._server)

    def kvstore(self, folder: str) -> dict[str, Any]:
        """Return tensorstore's name for a folder, which is empty or ends with a slash."""
        host, port = self._server.server_address[:2]
        header = f"{_HEADER}: {self._secret}"
        return {"driver": "http", "base_url": f"http://{host!s}:{port}", "path": f"/{folder}", "headers": [header]}

    def close(self) -> None:
        """End the server."""
        self._end()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that has ended its connection."""


def _end(server: ThreadingHTTPServer) -> None:
    server.shutdown()
    server.server_close()


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    secret = ""

    def files_now(self) -> Files | None:
        """Return the files, as long as they exist."""
        raise NotImplementedError

    def do_GET(self) -> None:
        """Send an object, or a range of one."""
        files, name = self.files_now(), unquote(self.path.partition("?")[0]).lstrip("/")
        if not hmac.compare_digest(self.headers.get(_HEADER, "").encode(), self.secret.encode()):
            self._answer(403)
        elif files is None or not files.has(name):
            self._answer(404)
        else:
            # a status from 500 on would be retried, and the store has already retried
            with contextlib.suppress(OSError):
                try:
                    self._send(files, name)
                except RelightError:
                    self._answer(409)

    do_HEAD = do_GET  # noqa: N815 - http.server's name

    def _send(self, files: Files, name: str) -> None:
        where = files.where(name)
        with files.open(name) as handle:
            size = size_of(handle)
            span, start, end = _RANGE.fullmatch(self.headers.get("Range", "")), 0, size
            if span is not None and span[1] is not None:
                start, end = int(span[1]), min(size, int(span[2]) + 1 if span[2] else size)
            elif span is not None and span[2] is not None:
                start = max(0, size - int(span[2]))
            if start > end or (span is not None and start == size):
                self._answer(416, {"Content-Range": f"bytes */{size}"})
                return
            position = min(end, start + _PIECE_BYTES)
            first = pread(handle, start, position - start, where) if self.command == "GET" else b""
            more = {"Content-Range": f"bytes {start}-{end - 1}/{size}"} if span is not None else {}
            self._answer(206 if span is not None else 200, {**more, "ETag": '"listed"'}, end - start)
            self.wfile.write(first)
            while position < end and self.command == "GET":
                count = min(_PIECE_BYTES, end - position)
                try:
                    data = pread(handle, position, count, where)
                except RelightError:
                    self.close_connection = True  # the client sees that the answer is too short
                    return
                self.wfile.write(data)
                position += count

    def _answer(self, status: int, headers: dict[str, str] | None = None, length: int = 0) -> None:
        self.send_response(status)
        for header, value in (headers or {}).items():
            self.send_header(header, value)
        self.send_header("Accept-Ranges", "bytes")
        self.send_header("Content-Length", str(length))
        self.end_headers()

    def log_message(self, *args: object) -> None:
        """Log nothing."""
