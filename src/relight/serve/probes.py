"""Health probes that are answered when their connection is accepted, before the event loop has read anything else.

Other requests are routed, which takes several turns of the event loop: to accept, to read, and to answer. When worker
threads keep the interpreter busy, each turn can take 100 ms and more.
"""

from __future__ import annotations

import re
import socket
from email.utils import formatdate

from starlette.responses import JSONResponse

from relight.monitoring.http import is_host
from relight.serve.auth_middleware import AccessRules, security_headers

HEALTHY = {"ok": True}
"""Body of the answer to ``GET /healthz``."""
PROBE_BYTES_MAX = 2048
"""Bytes of the largest request that is answered at once. A longer one is routed."""
_PLAIN_PROBE = re.compile(
    rb"GET /healthz HTTP/1\.1\r\n"
    rb"(?:(?:host|user-agent|accept|accept-encoding|accept-language|cache-control|pragma|connection): ?[\x20-\x7e]*\r\n)+"
    rb"\r\n",
    re.IGNORECASE,
)
"""A whole request with no body and no header that could change its answer, such as ``Authorization``."""
_HOST = re.compile(rb"^host: ?([\x20-\x7e]*)\r$", re.IGNORECASE | re.MULTILINE)


class ProbeResponder:
    """Answers plain ``GET /healthz`` requests as the route of that name does. Only for a server without TLS of its own."""

    def __init__(self, rules: AccessRules) -> None:
        self._hosts = ("localhost", *rules.names)
        response = JSONResponse(
            HEALTHY, headers={**security_headers(rules), "cache-control": "no-store", "connection": "close"}
        )
        lines = [b"HTTP/1.1 200 OK", *(name + b": " + value for name, value in response.raw_headers)]
        self._head, self._body = b"\r\n".join(lines), bytes(response.body)

    def respond(self, connection: socket.socket) -> bool:
        """Answer the connection's request if it is a plain probe. Return False if it is not: then nothing was read.

        The caller closes an answered connection. Never blocks. All bytes that the client has sent are read, because
        closing a socket with unread bytes would reset the connection, and the client could lose the answer.
        """
        try:
            request = connection.recv(PROBE_BYTES_MAX + 1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # nothing has arrived yet, or the client has reset the connection
            return False
        if len(request) > PROBE_BYTES_MAX or not self.is_probe(request):
            return False
        answer = self._head + f"\r\ndate: {formatdate(usegmt=True)}\r\n\r\n".encode() + self._body
        try:
            connection.recv(len(request), socket.MSG_DONTWAIT)
            connection.send(answer, socket.MSG_DONTWAIT)  # fits into the empty send buffer
        except OSError:
            pass  # the client has gone
        return True

    def is_probe(self, request: bytes) -> bool:
        """Return whether these bytes are one plain ``GET /healthz`` request that names this server as its host."""
        if _PLAIN_PROBE.fullmatch(request) is None:
            return False
        return is_host([host.decode("ascii").strip() for host in _HOST.findall(request)], self._hosts)
