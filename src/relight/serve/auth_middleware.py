"""Middleware before every page and API answer: checks of host, origin, credentials, rate and body size; security headers.

It wraps the whole application, so that no route is reachable without it. Each route declares its role itself (``needs``).
"""

from __future__ import annotations

import hashlib
import hmac
import secrets
from contextlib import suppress
from dataclasses import dataclass
from typing import Any
from urllib.parse import parse_qsl

from fastapi import Depends, Request
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import Headers, MutableHeaders
from starlette.requests import ClientDisconnect
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from relight.monitoring.http import is_host
from relight.serve.guesses import Guesses
from relight.serve.limits import Limiter
from relight.serve.proxies import Proxies, asker_of, host_of
from relight.serve.scope import ANONYMOUS, NOTHING, Caller, asking
from relight.serve.slots import StreamSlots
from relight.serve.state import TokenFile

OPEN = ("/login", "/healthz", "/readyz")
"""Paths that need no credentials and have no rate limit, as does ``/static``."""
UNCOUNTED = ("/healthz", "/readyz", "/events")
"""Paths that take no slot: health checks must never wait, and event streams last long. Streams have their own limit."""
LOGIN = "/login"
"""This path takes no slot either: requests without credentials must not keep users from logging in.

Once its body has been read, a login waits only for the delay of a wrong token.
"""
BODY_BYTES_MAX, LOGIN_BYTES_MAX = 64 << 10, 4 << 10
"""Largest request body in bytes: with credentials, and without, as for ``/login``."""
_TOKEN_CHARS_MAX, _COOKIES_MAX = 200, 4
_SAFE = ("GET", "HEAD", "OPTIONS")
_IN_THE_QUERY = {"token", "access_token", "auth", "authorization", "api_key"}
FORM = {"max_files": 0, "max_fields": 12}
HEADERS = {
    "content-security-policy": "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "x-frame-options": "DENY",
    "referrer-policy": "same-origin",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(), geolocation=(), microphone=()",
}


class HttpRefusal(Exception):
    """A request refused by the server, with the HTTP status and the seconds to wait before a retry."""

    def __init__(self, status: int, message: str, wait_s: float = 0.0) -> None:
        super().__init__(message)
        self.status, self.message, self.wait_s = status, message, wait_s


@dataclass(frozen=True)
class AccessRules:
    """Rules for access. ``hosts``: names of the server, in addition to ``localhost`` and IP addresses."""

    hosts: tuple[str, ...] = ()
    anonymous_read: bool = False
    secure: bool = False
    """Whether this server has TLS: cookies are then sent over TLS only."""
    public: str = ""
    """The public origin, ``https://NAME``, if a proxy terminates TLS. It decides Origin, Host, ``Secure`` and HSTS."""
    proxy_header: str = ""
    """Header in which an authenticating proxy names the user. It is trusted only from ``proxy_from``."""
    proxy_from: tuple[str, ...] = ()
    """Addresses and networks of trusted proxies: their ``X-Forwarded-For`` and ``proxy_header`` count."""
    proxy_role: str = "viewer"
    requests_per_second: float = 50.0
    burst: int = 300
    failures_per_minute: float = 10.0

    @property
    def cookie(self) -> str:
        """Name of the session cookie. With TLS it has the prefix ``__Host-``, so that no other host can set it."""
        return "__Host-relight" if self.is_secure else "relight"

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach the server by TLS, either its own or a proxy's."""
        return self.secure or bool(self.public)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the server: ``hosts`` and the host of ``public``."""
        return (*self.hosts, host_of(self.public)) if self.public else self.hosts


def failures_of(rules: AccessRules) -> Guesses:
    """Return the counts of wrong tokens."""
    return Guesses(rules.failures_per_minute)


class AuthMiddleware:
    """ASGI middleware that authenticates and limits every request to the application."""

    def __init__(self, app: ASGIApp, state: TokenFile, rules: AccessRules, failures: Guesses) -> None:
        self._app, self._state, self.rules, self.failures = app, state, rules, failures
        self.slots = StreamSlots()
        self._proxies = Proxies(rules.proxy_from)
        self._all = Limiter(rules.requests_per_second, rules.burst)
        self._key = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, as ASGI specifies."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # web sockets are not supported
        headers = Headers(scope=scope)
        sender = self._with_headers(scope, send)
        state = scope.setdefault("state", {})
        state |= {"who": None, "csrf": ""}
        state["client"] = asker_of(self._proxies.client_of(_address(scope), headers.getlist("x-forwarded-for")))
        try:
            self._check_request(scope, headers)
            who, csrf = await self._authenticate(scope, headers)
            state["asker"] = asker = _asker(who, state["client"])
            if scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
                self._limit(asker)
            self._check_origin(scope, headers)
            if who is None and scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
                raise HttpRefusal(401, "authentication required: log in, or send Authorization: Bearer rl_…")
            if scope["path"] not in UNCOUNTED:  # read the body before taking a slot: a slow client must not occupy one
                received = await _read_body(receive, BODY_BYTES_MAX if who is not None else LOGIN_BYTES_MAX)
                if received is None:
                    return
                receive = received
        except HttpRefusal as refused:
            await answer(refused, headers)(scope, receive, sender)
            return
        shown = f"{who.name}, {who.role}" + (f" of {who.scope}" if who.scope else "") if who is not None else ""
        state |= {"who": who, "csrf": csrf, "who_name": shown}
        with asking(who.scope if who is not None else NOTHING, asker), suppress(ClientDisconnect):
            if scope["path"] in UNCOUNTED:
                await self._app(scope, _limit_body(receive), sender)
            elif scope["path"] == LOGIN:
                await self._app(scope, receive, sender)
            elif await self.slots.take(asker):
                try:
                    await self._app(scope, receive, sender)
                finally:
                    self.slots.give(asker)
            else:
                await answer(HttpRefusal(503, "the server is busy", 1.0), headers)(scope, receive, sender)

    def _check_request(self, scope: Scope, headers: Headers) -> None:
        """Check method, host, length and content type, which do not depend on the caller. Raise ``HttpRefusal``."""
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise HttpRefusal(405, "this server supports GET and POST")
        if not is_host(headers.getlist("host"), ("localhost", *self.rules.names)):
            raise HttpRefusal(400, "unknown host name: give the server its names with relight serve --host NAME")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            raise HttpRefusal(400, "invalid Content-Length")
        if int(length) > BODY_BYTES_MAX:
            raise HttpRefusal(413, f"more than {BODY_BYTES_MAX} bytes")
        if any(name.lower() in _IN_THE_QUERY for name, _ in parse_qsl(scope["query_string"].decode("latin-1"))):
            raise HttpRefusal(
                400, "an address with a token ends up in logs: send the token as a header, Authorization: Bearer …"
            )
        path = scope["path"]
        if (
            scope["method"] == "POST"
            and path.startswith("/api/")
            and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
        ):
            raise HttpRefusal(415, "the API accepts application/json only")

    def _limit(self, asker: str) -> None:
        """Count one request. Raise ``HttpRefusal`` if the caller has sent too many."""
        if wait := self._all.wait_s(asker):
            raise HttpRefusal(429, "too many requests", wait)

    async def _authenticate(self, scope: Scope, headers: Headers) -> tuple[Caller | None, str]:
        """Return the caller and its CSRF token. Raise ``HttpRefusal`` for invalid credentials: they never fall back to anonymous access."""
        scope["state"]["bearer"] = False
        credentials = headers.getlist("authorization")
        # an authenticating proxy forwards the user's own credentials, such as Basic
        if self._proxies.trusts(_address(scope)):
            credentials = [line for line in credentials if _is_bearer(line)]
        if credentials:
            scheme, _, token = credentials[0].partition(" ")
            who = (
                None
                if len(credentials) > 1 or scheme.lower() != "bearer" or len(token) > _TOKEN_CHARS_MAX
                else self._state.who(token.strip())
            )
            if who is None:
                self._limit(_asker(None, scope["state"]["client"]))
                if wait := await self.failures.wrong(scope["state"]["client"], token):
                    raise HttpRefusal(429, "too many wrong tokens", wait)
                raise HttpRefusal(401, "no valid token: Authorization: Bearer rl_…, once")
            scope["state"]["bearer"] = True
            return who, ""
        if self.rules.proxy_header and self._proxies.trusts(_address(scope)):
            names = headers.getlist(self.rules.proxy_header)
            if len(names) == 1 and 0 < len(names[0]) <= 80 and names[0].isprintable():
                csrf = hmac.new(self._key, names[0].encode("utf-8", "replace"), hashlib.sha256).hexdigest()
                return Caller(names[0], self.rules.proxy_role, session="proxy"), csrf
        for cookie in self._cookies(headers):
            if (session := self._state.session_user(cookie)) is not None:
                return session
        return (Caller("anonymous", "viewer"), "") if self.rules.anonymous_read else (None, "")

    def _cookies(self, headers: Headers) -> list[str]:
        """Return the values of cookies with this server's exact name.

        Browsers also send the cookies of programs on other ports of this host. A strict parser stops at the first invalid cookie, which
        would log the user out.
        """
        pairs = [pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";")]
        return [value for name, _, value in pairs if name == self.rules.cookie and 0 < len(value) <= _TOKEN_CHARS_MAX][
            :_COOKIES_MAX
        ]

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Raise ``HttpRefusal`` unless a page of this server sent the request. Programs with a token are exempt."""
        if scope["method"] in _SAFE or scope["state"]["bearer"]:
            return
        origins = headers.getlist("origin")
        own_origin = f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        if self.rules.secure:
            own_origin = f"https://{headers.get('host', '')}"
        own_origin = self.rules.public or own_origin
        if origins != [own_origin] and not (not origins and headers.get("sec-fetch-site") == "same-origin"):
            raise HttpRefusal(403, f"this was not sent by a page of this server{_proxy_hint(origins, own_origin)}")

    def _with_headers(self, scope: Scope, send: Send) -> Send:
        static = scope["path"].startswith("/static/")

        async def sender(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in security_headers(self.rules).items():
                    headers[name] = value
                headers["cache-control"] = "max-age=3600" if static and message["status"] == 200 else "no-store"
            await send(message)

        return sender


def security_headers(rules: AccessRules) -> dict[str, str]:
    """Return the headers that every answer has: ``HEADERS``, and HSTS if browsers reach the server by TLS."""
    return {**HEADERS, "strict-transport-security": "max-age=31536000"} if rules.is_secure else HEADERS


def needs(role: str) -> Any:
    """Return a route's dependency that admits callers with at least ``role``. A browser's POST must carry its page's CSRF token."""

    async def check(request: Request) -> None:
        who: Caller | None = request.state.who
        if who is None:
            raise HttpRefusal(401, "authentication required")
        if not who.may(role):
            raise await refuse_role(request, role)
        if request.method not in _SAFE and not request.state.bearer:
            await check_csrf(request)

    check.role = role  # type: ignore[attr-defined] # tests read it to build the matrix of routes and roles
    return Depends(check)


async def refuse_role(request: Request, role: str) -> HttpRefusal:
    """Return the refusal for a role that does not suffice. If the request was an action, record it in the audit log."""
    who: Caller = request.state.who
    reason = f"this needs the role {role}; {who.name} has {who.role}"
    if request.method not in _SAFE:
        await run_in_threadpool(request.app.state.acts.refused, request.url.path.rpartition("/")[2], who, reason)
    return HttpRefusal(403, reason)


async def check_csrf(request: Request) -> None:
    """Raise ``HttpRefusal`` unless the CSRF token in the form or in the header is the caller's."""
    token = request.headers.get("x-csrf-token", "")
    if not token and "form" in request.headers.get("content-type", ""):
        token = str((await request.form(**FORM)).get("csrf", ""))  # type: ignore[arg-type]
    if not request.state.csrf or not hmac.compare_digest(token.encode("utf-8", "replace"), request.state.csrf.encode()):
        raise HttpRefusal(403, "the form's CSRF token is wrong or too old: open the page again")


def answer(refused: HttpRefusal, headers: Headers) -> Response:
    """Return a refusal as JSON, or as a redirect to the login page for a browser without credentials."""
    extra_headers = {"retry-after": str(int(refused.wait_s) + 1)} if refused.wait_s else {}
    if refused.status == 401:
        if "text/html" in headers.get("accept", "") and not any(
            _is_bearer(line) for line in headers.getlist("authorization")
        ):
            return RedirectResponse("/login", 303)
        extra_headers["www-authenticate"] = "Bearer"
    return JSONResponse({"error": {"kind": "refused", "what": refused.message}}, refused.status, extra_headers)


async def _read_body(receive: Receive, most: int) -> Receive | None:
    """Read a request's body and return a channel that repeats it. None if the client disconnected.

    Raise ``HttpRefusal`` for more than ``most`` bytes.
    """
    body = b""
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return None
        body += message.get("body", b"")
        if len(body) > most:
            raise HttpRefusal(413, f"more than {most} bytes")
        if not message.get("more_body", False):
            break
    pending: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def repeated() -> Message:
        return pending.pop() if pending else await receive()

    return repeated


def _limit_body(receive: Receive) -> Receive:
    """Limit a body of undeclared length. Raise ``HttpRefusal`` after ``BODY_BYTES_MAX`` bytes."""
    received = 0

    async def bounded() -> Message:
        nonlocal received
        message = await receive()
        received += len(message.get("body", b""))
        if received > BODY_BYTES_MAX:
            raise HttpRefusal(413, f"more than {BODY_BYTES_MAX} bytes")
        return message

    return bounded


def _proxy_hint(origins: list[str], here: str) -> str:
    """Return a hint for a browser that came through a TLS proxy that this server was not configured for."""
    if not here.startswith("http://") or len(origins) != 1 or not origins[0].startswith("https://"):
        return ""
    return ", which has no TLS; if a TLS proxy forwards to it: relight serve --public https://NAME"


def _asker(who: Caller | None, client: str) -> str:
    """Return the key of a request in rate limits: its token or user, else its address.

    Requests without credentials from an address then do not use up the limit of users with a token there.
    """
    if who is not None and who.token:
        return f"token {who.token}"
    return f"user {who.name}" if who is not None and who.session else f"{ANONYMOUS}{client}"


def _is_bearer(authorization: str) -> bool:
    return authorization.partition(" ")[0].lower() == "bearer"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "local"
