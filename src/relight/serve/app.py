"""The server's ASGI application: store followers, index, pages, API and event streams, in the authentication middleware."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Query, Request
from fastapi.exceptions import RequestValidationError
from fastapi.staticfiles import StaticFiles
from sse_starlette.sse import EventSourceResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response

from relight.audit import AuditLog
from relight.errors import RelightError
from relight.monitoring.settings import read_alerting
from relight.serve import api, pages, pages_actions
from relight.serve.actions import Actions
from relight.serve.auth_middleware import FORM, AccessRules, AuthMiddleware, HttpRefusal, answer, failures_of, needs
from relight.serve.auth_middleware import OPEN as OPEN
from relight.serve.event_feed import EventFeed
from relight.serve.guesses import Guesses
from relight.serve.index import Index
from relight.serve.jobs import Jobs
from relight.serve.live import PING_S, TOKEN_CHECK_S, Hub
from relight.serve.login_links import LoginLinks
from relight.serve.pages_render import HERE, render
from relight.serve.probes import HEALTHY
from relight.serve.reader import NOT_YET, POLL_S, StoreFollower, open_readers
from relight.serve.scope import Caller
from relight.serve.state import SESSION_S, TokenFile
from relight.serve.tasks import Tasks
from relight.serve.values import AuditRow
from relight.settings.environment import environment
from relight.store import open_bytes
from relight.store.urls import absolute
from relight.version import VERSION

Asked = Annotated[str, Query(max_length=200)]


@dataclass(frozen=True)
class ServerSettings:
    """Settings of a server. ``audit``: the audit store's URL; by default ``RELIGHT_AUDIT``, else a directory next to the state file.
    ``alerts``: the file with ``[alerts]``; by default ``relight.toml`` in the working directory."""

    stores: Sequence[str]
    state: Path | None = None
    audit: str = ""
    rules: AccessRules = field(default_factory=AccessRules)
    poll_s: float = POLL_S
    alerts: Path | None = None


def create_app(settings: ServerSettings) -> FastAPI:
    """Return the application. Its followers start with the server.

    Raise ``RelightError`` for an invalid store, or a state file that cannot be used.
    """
    hub = Hub()
    readers = open_readers(settings.stores, hub.changed, settings.poll_s)
    state = TokenFile(settings.state)
    audit_log = AuditLog(open_bytes(absolute(settings.audit or environment().audit or f"{state.path.resolve()}.audit")))
    jobs, tasks = Jobs(hub.changed, progressed=hub.progressed), Tasks(hub.changed)
    ids = {follower.store.url: follower.id for follower in readers}
    around = EventFeed(
        readers,
        read_alerting(settings.alerts),
        lambda url, run: hub.changed(ids[url], {run}) if url in ids else None,
        alerted=lambda url, run: hub.changed(ids[url], {run} - {""}, on_all_pages=True) if url in ids else None,
        kept=state.alarms(),
        keep=state.keep_alarms,
    )
    index = Index(readers, jobs, tokens=state.tokens, audited=lambda: _audited(audit_log), around=around)
    by_id = {follower.id: follower for follower in readers}

    def done(store: str) -> None:
        if store in by_id:
            by_id[store].poke()
        hub.changed(store)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        for follower in readers:
            follower.start()
        around.start()
        yield
        hub.close()
        await run_in_threadpool(around.close)
        jobs.close()
        await run_in_threadpool(tasks.close)
        await run_in_threadpool(_end, readers, state)

    app = FastAPI(
        title="Relight",
        version=VERSION,
        docs_url=None,
        redoc_url=None,
        openapi_url=None,
        lifespan=lifespan,
        redirect_slashes=False,
        description="The dashboard's data as JSON. Send a token as Authorization: Bearer rl_…",
    )
    app.state.index, app.state.acts, app.state.hub, app.state.store, app.state.readers = (
        index,
        Actions(index, state, audit_log, tasks, done),
        hub,
        state,
        readers,
    )
    app.state.tasks, app.state.links = tasks, LoginLinks(state)
    app.state.book, app.state.failures = audit_log, failures_of(settings.rules)
    app.include_router(pages.router(needs))
    app.include_router(pages_actions.router(needs))
    app.include_router(api.router())
    _streams(app, hub, state)
    _sessions(app, state, settings.rules)
    _errors(app)
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    app.add_middleware(AuthMiddleware, state=state, rules=settings.rules, failures=app.state.failures)
    return app


AUDIT_SHOWN = 2000
"""Newest entries of the audit log that pages and the API list: the commands show and export list all."""


def _end(readers: Sequence[StoreFollower], state: TokenFile) -> None:
    for follower in readers:
        follower.close()
    state.close()


def _audited(book: AuditLog) -> list[AuditRow]:
    rows = book.newest(AUDIT_SHOWN)
    return [
        AuditRow(
            entry.seq, entry.at, entry.who, entry.what, entry.on, entry.how, entry.role, entry.token, dict(entry.fields)
        )
        for entry in rows
    ]


def _streams(app: FastAPI, hub: Hub, state: TokenFile) -> None:
    valid = _remembered(state.is_valid)

    @app.get("/events", dependencies=[needs("viewer")], include_in_schema=False)
    async def events(request: Request, store: Asked = "", run: Asked = "") -> Response:
        who: Caller = request.state.who
        asker = request.state.asker
        if hub.full(asker):
            return JSONResponse(
                {"error": {"kind": "refused", "what": "too many event streams"}}, 503, {"retry-after": "30"}
            )
        if store:
            index: Index = app.state.index
            _ = index.state(store, run) if run else index.reader(store)

        def may_stay() -> bool:
            return not who.token or valid(who)

        return EventSourceResponse(hub.listen(store, run, asker, may_stay), ping=int(PING_S))


def _remembered(ask: Callable[[Caller], bool], for_s: float = TOKEN_CHECK_S / 2) -> Callable[[Caller], bool]:
    """Cache the answers of ``ask`` for ``for_s`` seconds: a thousand streams of one token then cost one query."""
    cached: dict[Caller, tuple[float, bool]] = {}

    def asked(who: Caller) -> bool:
        now = time.monotonic()
        if who not in cached or now - cached[who][0] > for_s:
            for old in [caller for caller, (moment, _) in cached.items() if now - moment > 60]:
                del cached[old]
            cached[who] = now, ask(who)
        return cached[who][1]

    return asked


def _sessions(app: FastAPI, state: TokenFile, rules: AccessRules) -> None:
    def set_session(response: Response, secret: str) -> None:
        response.set_cookie(
            rules.cookie,
            secret,
            max_age=int(SESSION_S),
            path="/",
            secure=rules.is_secure,
            httponly=True,
            samesite="strict",
        )

    @app.get("/healthz", include_in_schema=False)
    async def healthz() -> JSONResponse:  # runs in the event loop, so that it never waits for a thread
        return JSONResponse(HEALTHY)

    @app.get("/readyz", include_in_schema=False)
    async def readyz(request: Request) -> JSONResponse:
        ready = all(follower.now.state != NOT_YET for follower in request.app.state.readers)
        return JSONResponse({"ok": ready}, 200 if ready else 503)

    links: LoginLinks = app.state.links

    @app.get("/login", include_in_schema=False)
    # runs in the event loop, so that it never waits for a thread or a slot
    async def login(request: Request, once: Asked = "") -> HTMLResponse:
        if not once:
            return HTMLResponse(_login_page(""))
        if (session := links.begin_session(once)) is not None:
            # a redirect would arrive without the cookie if another site's page, such as a web terminal, has the link
            answered = HTMLResponse(_login_page("", entered=True), headers={"refresh": "0; url=/"})
            set_session(answered, session)
            return answered
        if wait := await app.state.failures.wrong(request.state.client, once):
            raise HttpRefusal(429, "too many wrong login links", wait)
        return HTMLResponse(_login_page("This login link was used already, or has expired. Enter a token."), 401)

    @app.post("/login", include_in_schema=False)
    async def enter(request: Request) -> Response:
        failures: Guesses = request.app.state.failures
        token = str((await request.form(**FORM)).get("token", ""))[:200].strip()  # type: ignore[arg-type]
        who = state.who(token)
        if who is None:
            if wait := await failures.wrong(request.state.client, token):
                raise HttpRefusal(429, "too many wrong tokens", wait)
            return HTMLResponse(_login_page("This token is not valid."), 401)
        response = RedirectResponse("/", 303)
        set_session(response, state.begin_session(who))
        return response

    @app.post("/logout", dependencies=[needs("viewer")], include_in_schema=False)
    async def leave(request: Request) -> Response:
        state.end_session(request.state.who.session)
        response = RedirectResponse("/login", 303)
        response.delete_cookie(rules.cookie, path="/", secure=rules.is_secure, httponly=True, samesite="strict")
        return response


@lru_cache(4)
def _login_page(wrong: str, entered: bool = False) -> str:
    """Return the login page, with an error message if there is one. ``entered``: a login link has begun a session. Cached."""
    return render("login.html", "", wrong=wrong, entered=entered)


def _errors(app: FastAPI) -> None:
    """Add error handlers: pages for browsers, JSON for programs, without internals such as tracebacks."""

    def for_people(request: Request) -> bool:
        return "text/html" in request.headers.get("accept", "") and not request.url.path.startswith("/api/")

    @app.exception_handler(RelightError)
    async def ours(request: Request, error: RelightError) -> Response:
        return pages.refused(request, error, api.status_of(error)) if for_people(request) else api.error_answer(error)

    @app.exception_handler(HttpRefusal)
    async def refused(request: Request, error: HttpRefusal) -> Response:
        return answer(error, request.headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> Response:
        lines = [
            f"{'.'.join(str(part) for part in problem['loc'])}: {problem['msg']}" for problem in error.errors()[:10]
        ]
        return JSONResponse(
            {
                "error": {
                    "kind": "config",
                    "what": "invalid request",
                    "details": [line.encode("utf-8", "replace").decode()[:300] for line in lines],
                }
            },
            422,
        )

    @app.exception_handler(HTTPException)
    async def other(request: Request, error: HTTPException) -> Response:
        return JSONResponse({"error": {"kind": "refused", "what": str(error.detail)}}, error.status_code)
