"""The pages over synthetic values: an application with the server's content policy, for tests and for browsers."""

from __future__ import annotations

import asyncio
import hashlib
import warnings
from collections.abc import AsyncIterator, Mapping
from typing import Any

from fastapi import Depends, FastAPI, Request
from fastapi.openapi.utils import get_openapi
from fastapi.staticfiles import StaticFiles
from sse_starlette.sse import EventSourceResponse
from starlette.responses import Response
from tests.serve.made_index import NOW, MadeIndex

from relight.errors import ConfigError
from relight.serve import api, pages, pages_actions
from relight.serve.api import json_response
from relight.serve.curves import smoothed
from relight.serve.pages_render import HERE
from relight.serve.scope import Caller
from relight.serve.tasks import ServerTask

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # it prefers httpx2, but the other tests use httpx
    from fastapi.testclient import TestClient

__all__ = ["TestClient", "application"]

POLICY = "default-src 'self'; object-src 'none'; base-uri 'none'; form-action 'self'; frame-ancestors 'none'"


SCHEMA = get_openapi(title="Relight", version="1", routes=api.router().routes)


class MadeActs:
    """Records the requested actions."""

    def __init__(self) -> None:
        self.done: list[tuple[str, dict[str, str]]] = []

    def plan(self, verb: str, fields: Mapping[str, str], who: Any) -> pages_actions.Planned:
        """Return the plan of an action. The tag ``taken`` is refused."""
        if fields.get("name") == "taken":
            raise ConfigError("the tag 'taken' is there already", hint="choose another name")
        rows = [[name, value] for name, value in fields.items()]
        digest = hashlib.sha256(repr((verb, sorted(fields.items()), len(self.done))).encode()).hexdigest()
        return pages_actions.Planned(
            verb.capitalize(),
            f"This would {verb}.",
            digest,
            ("What", "Which"),
            rows,
            f"relight {verb} …",
            verb in ("prune", "revoke"),
        )

    def execute(self, verb: str, fields: Mapping[str, str], who: Any, digest: str = "") -> pages_actions.ActionOutcome:
        """Record an action."""
        self.done.append((verb, dict(fields)))
        return pages_actions.ActionOutcome(True, f"{verb}: done")

    def refused(self, verb: str, who: Any, reason: str) -> None:
        """Do nothing, because there is no audit log."""


class MadeTasks:
    """An ended task and a running one. Their texts are as hostile as the index's names."""

    def __init__(self, evil: str) -> None:
        self._evil = evil

    def get(self, id_: str) -> ServerTask:
        """Return the running task for ``going``, else the ended one."""
        task = ServerTask(
            id_,
            "drill",
            "main",
            "gpt2-small" + self._evil,
            "anna" + self._evil,
            NOW - 60,
            [f"verify: passed{self._evil}", "restore: passed, 1 s"],
        )
        if id_ != "going":
            task.end(
                pages_actions.ActionOutcome(
                    True, "7 passed; 3 s" + self._evil, "verify: passed: the copies were read" + self._evil
                ),
                NOW,
            )
        return task


def application(index: Any = None) -> FastAPI:
    """Return the application. ``app.state.changed`` sends an event of a change to all streams."""
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
    app.state.tasks = MadeTasks(getattr(index, "evil", ""))
    app.state.index, app.state.acts, app.state.streams, app.state.asked = index or MadeIndex(), MadeActs(), [], []

    def needs(role: str) -> Any:
        def check(request: Request) -> None:
            app.state.asked.append((request.url.path, role))
            request.state.csrf, request.state.who = "made-csrf", Caller("anna", "admin", session="made")

        return Depends(check)

    @app.middleware("http")
    async def policy(request: Request, call_next: Any) -> Response:
        response: Response = await call_next(request)
        response.headers["content-security-policy"] = POLICY
        return response

    @app.get("/events")
    async def events(request: Request) -> EventSourceResponse:
        async def changes() -> AsyncIterator[dict[str, str]]:
            mine: asyncio.Queue[str] = asyncio.Queue()
            app.state.streams.append((asyncio.get_running_loop(), mine))
            while True:
                yield {"event": await mine.get(), "data": "1"}

        return EventSourceResponse(changes())

    @app.get("/api/v1/runs/{store}/{run:path}/series")
    def series(store: str, run: str, name: str, smooth: int = 0) -> Response:
        return json_response(smoothed(app.state.index.series(store, run)[name], smooth))

    def changed() -> None:
        for loop, queue in app.state.streams:
            loop.call_soon_threadsafe(queue.put_nowait, "changed")

    app.state.changed = changed
    app.openapi = lambda: SCHEMA  # type: ignore[method-assign]
    app.include_router(pages.router(needs))
    app.include_router(pages_actions.router(needs))
    app.mount("/static", StaticFiles(directory=HERE / "static"), name="static")
    return app
