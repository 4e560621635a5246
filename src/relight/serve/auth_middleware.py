"""What stands before every page and answer: which host was meant, who is asking, how often, how much; and the headers that browsers go by.

In front of the application, so that nothing can be reached around it. Roles are the routes' own (``needs``).
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
"""Addresses that answer whoever asks, besides ``/static``; no count of requests closes them."""
UNCOUNTED = ("/healthz", "/readyz", "/events")
"""Answered without a slot: health must never wait, and event streams last; they have a bound of their own."""
LOGIN = "/login"
"""Takes no slot either: once its body has been read, it never waits but for the delay of a wrong token, and requests without credentials
must not keep others from logging in."""
BODY_BYTES_MAX, LOGIN_BYTES_MAX = 64 << 10, 4 << 10
"""Bytes of a request's body: with credentials, and without any, which only ``/login`` takes."""
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
    """An answer in place of what was asked for."""

    def __init__(self, status: int, says: str, wait_s: float = 0.0) -> None:
        super().__init__(says)
        self.status, self.says, self.wait_s = status, says, wait_s


@dataclass(frozen=True)
class AccessRules:
    """Who may come in, and how. ``hosts``: names by which the server is reached, beside ``localhost`` and addresses."""

    hosts: tuple[str, ...] = ()
    anonymous_read: bool = False
    secure: bool = False
    """TLS: cookies are for it alone."""
    public: str = ""
    """The origin that people use, ``https://NAME``, if a proxy has the TLS: it decides Origin, Host, ``Secure`` and HSTS."""
    proxy_header: str = ""
    """In which a proxy that logs people in says who it is; believed from ``proxy_from`` alone."""
    proxy_from: tuple[str, ...] = ()
    """Addresses and networks of proxies whose ``X-Forwarded-For`` and ``proxy_header`` are believed."""
    proxy_role: str = "viewer"
    requests_per_second: float = 50.0
    burst: int = 300
    failures_per_minute: float = 10.0

    @property
    def cookie(self) -> str:
        """The session cookie's name: with TLS one that no other host can set."""
        return "__Host-relight" if self.is_secure else "relight"

    @property
    def is_secure(self) -> bool:
        """Whether browsers reach the server by TLS, its own or a proxy's."""
        return self.secure or bool(self.public)

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the server: ``hosts``, and the one in ``public``."""
        return (*self.hosts, host_of(self.public)) if self.public else self.hosts


def failures_of(rules: AccessRules) -> Guesses:
    """Return the counts of wrong tokens."""
    return Guesses(rules.failures_per_minute)


class AuthMiddleware:
    """The application, guarded."""

    def __init__(self, app: ASGIApp, state: TokenFile, rules: AccessRules, failures: Guesses) -> None:
        self._app, self._state, self.rules, self.failures = app, state, rules, failures
        self.slots = StreamSlots()
        self._proxies = Proxies(rules.proxy_from)
        self._all = Limiter(rules.requests_per_second, rules.burst)
        self._key = secrets.token_bytes(32)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """See ASGI."""
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            return  # there are no web sockets here
        headers = Headers(scope=scope)
        sender = self._with_headers(scope, send)
        given = scope.setdefault("state", {})
        given["client"] = asker_of(self._proxies.client_of(_address(scope), headers.getlist("x-forwarded-for")))
        try:
            self._check_request(scope, headers)
            who, csrf = await self._who(scope, headers)
            given["asker"] = asker = _asker(who, given["client"])
            if scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
                self._limit(asker)
            self._check_origin(scope, headers)
            if who is None and scope["path"] not in OPEN and not scope["path"].startswith("/static/"):
                raise HttpRefusal(401, "authentication required: log in, or send Authorization: Bearer rl_…")
            if scope["path"] not in UNCOUNTED:  # a slow sender must hold its connection only, and no slot
                received = await _whole(receive, BODY_BYTES_MAX if who is not None else LOGIN_BYTES_MAX)
                if received is None:
                    return
                receive = received
        except HttpRefusal as refused:
            await answer(refused, headers)(scope, receive, sender)
            return
        shown = f"{who.name}, {who.role}" + (f" of {who.scope}" if who.scope else "") if who is not None else ""
        given |= {"who": who, "csrf": csrf, "who_name": shown}
        with asking(who.scope if who is not None else NOTHING, asker), suppress(ClientDisconnect):
            if scope["path"] in UNCOUNTED:
                await self._app(scope, _bounded(receive), sender)
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
        """What does not depend on who it is."""
        if scope["method"] not in ("GET", "HEAD", "POST"):
            raise HttpRefusal(405, "this server knows GET and POST")
        if not is_host(headers.getlist("host"), ("localhost", *self.rules.names)):
            raise HttpRefusal(400, "this server is not called that: relight serve --host NAME says what it is called")
        length = headers.get("content-length", "0")
        if not length.isdecimal() or len(length) > 18:
            raise HttpRefusal(400, "a length that is none")
        if int(length) > BODY_BYTES_MAX:
            raise HttpRefusal(413, f"more than {BODY_BYTES_MAX} bytes")
        if any(name.lower() in _IN_THE_QUERY for name, _ in parse_qsl(scope["query_string"].decode("latin-1"))):
            raise HttpRefusal(400, "a token in an address is in every log: send it as a header, Authorization: Bearer …")
        path = scope["path"]
        if (
            scope["method"] == "POST"
            and path.startswith("/api/")
            and headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json"
        ):
            raise HttpRefusal(415, "the API takes application/json")

    def _limit(self, asker: str) -> None:
        """Count one request."""
        if wait := self._all.wait_s(asker):
            raise HttpRefusal(429, "too many requests", wait)

    async def _who(self, scope: Scope, headers: Headers) -> tuple[Caller | None, str]:
        """Who is asking, and his word for forms. ``Refused`` for credentials that are none: they never fall back to less."""
        scope["state"]["bearer"] = False
        told = headers.getlist("authorization")
        if self._proxies.trusts(_address(scope)):  # a proxy that logs people in forwards the credentials it was given, such as Basic
            told = [one for one in told if _is_bearer(one)]
        if told:
            scheme, _, token = told[0].partition(" ")
            who = None if len(told) > 1 or scheme.lower() != "bearer" or len(token) > _TOKEN_CHARS_MAX else self._state.who(token.strip())
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
                word = hmac.new(self._key, names[0].encode("utf-8", "replace"), hashlib.sha256).hexdigest()
                return Caller(names[0], self.rules.proxy_role, session="proxy"), word
        for cookie in self._cookies(headers):
            if (found := self._state.session_user(cookie)) is not None:
                return found
        return (Caller("anonymous", "viewer"), "") if self.rules.anonymous_read else (None, "")

    def _cookies(self, headers: Headers) -> list[str]:
        """Return the values of cookies with this server's exact name.

        Programs on other ports of this host send their cookies here as well. A strict parser stops at the first odd one, and the user
        would be logged out.
        """
        pairs = [pair.strip().partition("=") for line in headers.getlist("cookie") for pair in line.split(";")]
        return [value for name, _, value in pairs if name == self.rules.cookie and 0 < len(value) <= _TOKEN_CHARS_MAX][:_COOKIES_MAX]

    def _check_origin(self, scope: Scope, headers: Headers) -> None:
        """Whether a page of this very server sends this; programs with a token are not asked."""
        if scope["method"] in _SAFE or scope["state"]["bearer"]:
            return
        origins = headers.getlist("origin")
        here = f"{scope.get('scheme', 'http')}://{headers.get('host', '')}"
        if self.rules.secure:
            here = f"https://{headers.get('host', '')}"
        here = self.rules.public or here
        if origins != [here] and not (not origins and headers.get("sec-fetch-site") == "same-origin"):
            raise HttpRefusal(403, f"this was not sent by a page of this server{_proxy_hint(origins, here)}")

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
    """A route's declaration: only those who may at least ``role``. Posts of a browser must bring the word that its page was given."""

    async def check(request: Request) -> None:
        who: Caller | None = request.state.who
        if who is None:
            raise HttpRefusal(401, "who are you? A token is needed here")
        if not who.may(role):
            raise await refuse_role(request, role)
        if request.method not in _SAFE and not request.state.bearer:
            await check_csrf(request)

    check.role = role  # type: ignore[attr-defined] # the matrix of routes and roles is made from it
    return Depends(check)


async def refuse_role(request: Request, role: str) -> HttpRefusal:
    """Return the refusal of a token whose role does not suffice. One of an action is in the audit log."""
    who: Caller = request.state.who
    reason = f"this takes the role {role}; {who.name} has {who.role}"
    if request.method not in _SAFE:
        await run_in_threadpool(request.app.state.acts.refused, request.url.path.rpartition("/")[2], who, reason)
    return HttpRefusal(403, reason)


async def check_csrf(request: Request) -> None:
    """The word is in the form, or in a header."""
    given = request.headers.get("x-csrf-token", "")
    if not given and "form" in request.headers.get("content-type", ""):
        given = str((await request.form(**FORM)).get("csrf", ""))  # type: ignore[arg-type]
    if not request.state.csrf or not hmac.compare_digest(given.encode("utf-8", "replace"), request.state.csrf.encode()):
        raise HttpRefusal(403, "this form is not one of yours, or too old: open the page again")


def answer(refused: HttpRefusal, headers: Headers) -> Response:
    """As a program, or a browser, reads it."""
    extra = {"retry-after": str(int(refused.wait_s) + 1)} if refused.wait_s else {}
    if refused.status == 401:
        if "text/html" in headers.get("accept", "") and not any(_is_bearer(one) for one in headers.getlist("authorization")):
            return RedirectResponse("/login", 303)
        extra["www-authenticate"] = "Bearer"
    return JSONResponse({"error": {"kind": "refused", "what": refused.says}}, refused.status, extra)


async def _whole(receive: Receive, most: int) -> Receive | None:
    """Read a request's body and return a channel that repeats it; None if the client hung up. ``Refused`` for more than ``most`` bytes."""
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


def _bounded(receive: Receive) -> Receive:
    """A body that does not say how long it is, is cut off all the same."""
    had = 0

    async def bounded() -> Message:
        nonlocal had
        message = await receive()
        had += len(message.get("body", b""))
        if had > BODY_BYTES_MAX:
            raise HttpRefusal(413, f"more than {BODY_BYTES_MAX} bytes")
        return message

    return bounded


def _proxy_hint(origins: list[str], here: str) -> str:
    """Return the way out for a browser that came through a TLS proxy that this server does not know of."""
    if not here.startswith("http://") or len(origins) != 1 or not origins[0].startswith("https://"):
        return ""
    return ", which has no TLS; if a TLS proxy forwards to it: relight serve --public https://NAME"


def _asker(who: Caller | None, client: str) -> str:
    """Return what limits count a request by: its token or its user, so that a flood from one address does not stop the others there."""
    if who is not None and who.token:
        return f"token {who.token}"
    return f"user {who.name}" if who is not None and who.session else f"{ANONYMOUS}{client}"


def _is_bearer(authorization: str) -> bool:
    return authorization.partition(" ")[0].lower() == "bearer"


def _address(scope: Scope) -> str:
    client = scope.get("client")
    return str(client[0]) if client else "local"
