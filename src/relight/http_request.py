"""Requests by HTTP to services that a person named: an Alertmanager, a Prometheus; and reasons of failed requests in words.

Invariants: no redirect is followed, because it would take a password to another server. A response has a size limit and
a deadline. An error names the server and the path, never users, passwords or parameters. May import: ``errors``, ``units``.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote, urlsplit, urlunsplit

from relight.errors import ConfigError, StoreUnavailable
from relight.units import duration_text, size_text

STATUS_MEANINGS = {
    401: "it requires a token or a login",
    403: "it refuses this client",
    407: "a proxy requires a login",
}
_PIECE = 64 << 10


class NoRedirect(urllib.request.HTTPRedirectHandler):
    """Raises an error for a redirect, because its target is not the server that was named."""

    def redirect_request(self, *args: Any, **more: Any) -> None:
        """Refuse."""


def basic_auth(user: str, password: str) -> dict[str, str]:
    """Return the header for a user with a password."""
    return {"Authorization": "Basic " + base64.b64encode(f"{user}:{password}".encode()).decode()}


def without_user(url: str) -> tuple[str, dict[str, str]]:
    """Return a URL without its user and password, and the header that replaces them. Raise ``ConfigError`` for an invalid URL."""
    try:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname or (parts.port or 1) < 1:
            raise ValueError
    except ValueError:
        hint = "http://HOST:PORT or https://HOST"
        raise ConfigError("that is not the address of a server", where=url_shown(url), hint=hint) from None
    user = basic_auth(unquote(parts.username), unquote(parts.password or "")) if parts.username else {}
    return urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])), user


def url_shown(url: str) -> str:
    """Return a URL for messages: without user, password and parameters."""
    scheme, separator, rest = url.partition("://")
    place = rest.partition("?")[0].partition("#")[0]
    host, slash, path = place.partition("/")
    return f"{scheme}{separator}{host.rpartition('@')[2]}{slash}{path}" if separator else "…"


def request(
    url: str, *, headers: Mapping[str, str], timeout_s: float, bytes_max: int, data: bytes | None = None, what: str
) -> bytes:
    """Return the response to a GET, or with ``data`` to a POST. ``what``: the server in words, for errors.

    Raise ``StoreUnavailable`` if the server does not answer, refuses, or sends more than ``bytes_max``.
    """
    opener, ends = urllib.request.build_opener(NoRedirect()), time.monotonic() + timeout_s
    body = bytearray()
    try:
        sent = urllib.request.Request(url, data=data, headers=dict(headers))  # noqa: S310 - checked by without_user
        with opener.open(sent, timeout=timeout_s) as response:
            while piece := response.read1(_PIECE):
                body += piece
                if len(body) > bytes_max:
                    raise StoreUnavailable(
                        f"{what} sends more than {size_text(bytes_max)}", where=url_shown(url), retryable=False
                    )
                if time.monotonic() > ends:
                    raise TimeoutError
    except (OSError, ValueError, http.client.HTTPException) as error:
        more = ""
        if isinstance(error, urllib.error.HTTPError):
            with contextlib.suppress(OSError, ValueError, http.client.HTTPException):
                more = " ".join(error.read(500).decode(errors="replace").split())[:200]
        why = why_no_answer(error, timeout_s) + (f": {more}" if more else "")
        raise StoreUnavailable(f"{what} did not answer the request: {why}", where=url_shown(url)) from None
    return bytes(body)


def why_no_answer(error: Exception, timeout_s: float) -> str:
    """Return the reason in words, without numbers that differ between tries, so that one reason is reported once."""
    if isinstance(error, urllib.error.HTTPError):
        target = error.headers.get("Location", "") if 300 <= error.code < 400 else ""
        more = (
            f"a redirect to {target[:100]}, which is not followed"
            if target
            else STATUS_MEANINGS.get(error.code, error.reason)
        )
        return f"HTTP status {error.code}: {more}"
    if isinstance(error, urllib.error.URLError):
        error = error.reason if isinstance(error.reason, Exception) else error
    if isinstance(error, TimeoutError):
        return f"no answer within {duration_text(timeout_s)}"
    if isinstance(error, http.client.IncompleteRead):
        return "it ended the connection before the end of its answer"
    if isinstance(error, http.client.BadStatusLine):
        return "it ended the connection without a valid answer"
    why = error.strerror if isinstance(error, OSError) else None
    return (why or str(error) or type(error).__name__)[:160]
