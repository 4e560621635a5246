"""Requests to a metadata server of a cloud: limited in time and size, without a proxy, with AWS's session tokens (IMDSv2).

Invariants: No request takes longer than ``LIMIT_S``, even if the server sends a byte now and then. No redirect is
followed: its target is not the metadata server. Proxies of the environment are never used: metadata servers have
link-local addresses, which a proxy would resolve on its own machine.
"""

from __future__ import annotations

import contextlib
import http.client
import math
import socket
import ssl
import time
from collections.abc import Mapping
from email.message import Message
from typing import Any, NamedTuple
from urllib.parse import urljoin, urlsplit

from relight.http_request import STATUS_MEANINGS
from relight.units import size_text

LIMIT_S = 2.0
"""Seconds for a whole request; a name that cannot be resolved may take longer."""
BYTES_MAX = 64_000
_TTL, _TOKEN = "X-aws-ec2-metadata-token-ttl-seconds", "X-aws-ec2-metadata-token"
_TTL_S = 21600
_EARLY_S = 60.0
"""Seconds before its end at which a token is renewed; half of its time, if that is less."""
_NO_TOKENS = (403, 404, 405)
"""Statuses of the token's address that mean "only IMDSv1". After any other status no request without a token is sent."""


class NoNotice(ValueError):
    """An answer that is neither a notice nor the absence of a notice."""


class BadStatus(NoNotice):
    """An answer with a status that is not expected."""

    def __init__(self, answer: MetadataAnswer, of: str = "") -> None:
        target = answer.headers.get("Location", "") if 300 <= answer.status < 400 else ""
        more = (
            f"a redirect to {target[:100]}, which is not followed" if target else STATUS_MEANINGS.get(answer.status, "")
        )
        more = more or http.client.responses.get(answer.status, "not a status of HTTP")
        super().__init__(f"HTTP status {answer.status}{of}: {more}")


class MetadataAnswer(NamedTuple):
    """An answer. ``body`` is empty unless ``ok``."""

    status: int
    headers: Message
    body: str

    @property
    def ok(self) -> bool:
        """Whether the status is one of success."""
        return 200 <= self.status < 300


class MetadataServer:
    """The server at the address of ``url``. It sends ``headers``; with ``token_path``, also a session token from there.

    Not thread-safe: one thread polls a server.
    """

    def __init__(self, url: str, headers: Mapping[str, str], token_path: str = "") -> None:
        self._url, self._headers, self._token_path = url, headers, token_path
        self._token, self._token_until = "", 0.0

    @property
    def has_token(self) -> bool:
        """Whether the server has issued a session token."""
        return bool(self._token)

    def get(self, path: str = "") -> MetadataAnswer:
        """Return the answer of the server's address, or of another path there.

        Raise ``OSError``, ``NoNotice`` or ``http.client.HTTPException``.
        """
        answer = self._get(path)
        if answer.status == 401 and self._token_path:  # the token ended too early, or the server began to require one
            self._token_until = 0.0
            answer = self._get(path)
        return answer

    def _get(self, path: str) -> MetadataAnswer:
        headers = dict(self._headers)
        if self._token_path:
            if time.monotonic() >= self._token_until:
                self._renew_token()
            if self._token:
                headers[_TOKEN] = self._token
        return request(urljoin(self._url, path), headers)

    def _renew_token(self) -> None:
        self._token = ""
        answer = request(urljoin(self._url, self._token_path), {_TTL: str(_TTL_S)}, "PUT")
        if answer.status in _NO_TOKENS:
            self._token_until = math.inf
            return
        if not answer.ok:
            raise BadStatus(answer, " of the session token")
        token, granted = answer.body.strip(), answer.headers.get(_TTL, "")
        if not token or len(token) > 1000 or not (token.isascii() and token.isprintable()):
            raise NoNotice("it answers with an invalid session token")
        ttl_s = int(granted) if granted.isdecimal() and len(granted) < 9 else _TTL_S
        self._token, self._token_until = token, time.monotonic() + ttl_s - min(_EARLY_S, ttl_s / 2)


def request(url: str, headers: Mapping[str, str], method: str = "GET") -> MetadataAnswer:
    """Send a request and return its answer.

    Raise ``TimeoutError`` after ``LIMIT_S``, ``NoNotice`` for an answer beyond ``BYTES_MAX``, another ``OSError`` or
    ``http.client.HTTPException`` if the connection fails.
    """
    parts, ends = urlsplit(url), time.monotonic() + LIMIT_S
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "https" else 80)
    target = f"{parts.path or '/'}{'?' if parts.query else ''}{parts.query}"
    with contextlib.closing(http.client.HTTPConnection(host, port)) as connection:
        connection.sock = _connected(host, port, parts.scheme == "https", ends)
        connection.request(method, target, headers=dict(headers))
        with contextlib.closing(connection.getresponse()) as answer:
            if not 200 <= answer.status < 300:
                return MetadataAnswer(answer.status, answer.headers, "")
            data = answer.read(BYTES_MAX + 1)
            if len(data) > BYTES_MAX:
                raise NoNotice(f"its answer is longer than {size_text(BYTES_MAX)}")
            if answer.length:
                raise http.client.IncompleteRead(data, answer.length)
            return MetadataAnswer(answer.status, answer.headers, data.decode(errors="replace"))


class _TimedSocket(socket.socket):
    """A socket that ends all its calls at ``ends``. A socket's own timeout begins again with each byte."""

    ends = math.inf

    def recv_into(self, *given: Any, **more: Any) -> int:
        """Receive in the time that is left."""
        self._limit()
        return super().recv_into(*given, **more)

    def sendall(self, *given: Any, **more: Any) -> None:
        """Send in the time that is left."""
        self._limit()
        super().sendall(*given, **more)

    def _limit(self) -> None:
        left = self.ends - time.monotonic()
        if left <= 0:
            raise TimeoutError
        self.settimeout(left)


class _TimedTlsSocket(_TimedSocket, ssl.SSLSocket):
    """``_TimedSocket`` with TLS."""


def _connected(host: str, port: int, tls: bool, ends: float) -> _TimedSocket:
    plain = socket.create_connection((host, port), LIMIT_S)
    if not tls:
        timed = _TimedSocket(plain.family, plain.type, plain.proto, plain.detach())
        timed.ends = ends
        return timed
    context = ssl.create_default_context()
    context.sslsocket_class = _TimedTlsSocket
    with plain:  # wrap_socket takes its descriptor
        secured = context.wrap_socket(plain, server_hostname=host)
    assert isinstance(secured, _TimedTlsSocket)
    secured.ends = ends
    return secured
