"""The API, ``/api/v1``: the data of the pages as JSON, and actions in two steps. Each route declares the role that it needs."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Path, Query, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response

from relight.errors import CheckpointNotFound, ConfigError, Fenced, RelightError, StoreUnavailable
from relight.run_names import shown_json
from relight.serve import pieces
from relight.serve.auth_middleware import needs, refuse_role
from relight.serve.curves import smoothed
from relight.serve.index_rows import SORTS
from relight.serve.pages_views import ACTIONS
from relight.serve.scope import Caller, masked_error
from relight.serve.values import Working

PREFIX = "/api/v1"
LIMIT_MAX = 500
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="Maximum number of rows.")]
After = Annotated[str | None, Query(max_length=400, description="The value of next from the piece before.")]
Name = Annotated[str, Path(max_length=255)]
Path400 = Annotated[str, Query(max_length=400, description="A tensor's path, as listed in its checkpoint.")]
Find = Annotated[
    str,
    Query(
        max_length=400, description="Only rows with this text in a tensor's path, or in a run's name, store or host."
    ),
]
Text = Annotated[str, Query(max_length=40, description="Only jobs in this state.")]
Sort = Annotated[
    str,
    Query(max_length=400, description=f"{', '.join(SORTS)} or metric:NAME; with - before it the largest first."),
]
Changed = Annotated[bool, Query(description="Omit equal tensors.")]
Metric = Annotated[str, Query(max_length=400, description="A metric, as listed in series of the run.")]
Smooth = Annotated[int, Query(ge=0, le=10_000, description="Points of the exponential moving average; 0: raw values.")]
Spec = Annotated[str, Query(max_length=400, description="A checkpoint: [STORE/]RUN@WHICH.")]


class ActionRequest(BaseModel):
    """An action. Without ``confirm`` the answer is the plan. With the plan's digest the action is done, unless the plan has changed."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fields: dict[Annotated[str, Field(max_length=40)], Annotated[str, Field(max_length=400)]] = Field(max_length=12)
    confirm: str = Field(default="", max_length=64)


class Problem(BaseModel):
    """An error: ``kind`` for programs, the rest for people."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""
    details: list[str] = []


class ProblemAnswer(BaseModel):
    """Body of every error response."""

    error: Problem


_PROBLEMS = {
    400: "Invalid request, host or Content-Length", 401: "No valid token", 403: "Not with this role",
    404: "Not found, or not visible to you", 405: "Method not allowed", 409: "It has changed since it was planned",
    413: "Body too long", 415: "Not application/json",
    422: "Invalid parameter or field", 429: "Too many requests", 503: "The store did not answer",
}  # fmt: skip
_RESPONSES: dict[int | str, dict[str, Any]] = {
    status: {"description": description, "model": ProblemAnswer} for status, description in _PROBLEMS.items()
}


def status_of(error: RelightError) -> int:
    """Return the HTTP status of an error."""
    if isinstance(error, CheckpointNotFound):
        return 404
    if isinstance(error, ConfigError):
        return 422
    if isinstance(error, StoreUnavailable):
        return 503
    return 409 if isinstance(error, Fenced) else 422


def json_response(value: Any, status: int = 200) -> Response:
    """Return a value as a JSON response. NaN and infinite numbers are null."""
    return Response(shown_json(msgspec.json.encode(value, enc_hook=str)), status, media_type="application/json")


def error_answer(error: RelightError) -> JSONResponse:
    """Return an error as JSON, without names of runs outside the caller's scope."""
    error = masked_error(error)
    body = {
        "error": {
            "kind": error.kind,
            "what": error.what[:500],
            "where": error.where[:300],
            "hint": error.hint[:500],
            "details": list(error.details[:20]),
        }
    }
    return JSONResponse(msgspec.to_builtins(_ascii(body)), status_of(error))


def _ascii(value: Any) -> Any:
    """Return ``value`` with lone surrogates in its strings replaced, and NaN and infinite numbers as None."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _ascii(item) for name, item in value.items()}
    return (
        [_ascii(item) for item in value]
        if isinstance(value, list)
        else value
        if not isinstance(value, float) or math.isfinite(value)
        else None
    )


def router() -> APIRouter:
    """Return all routes of the API."""
    routes = APIRouter(prefix=PREFIX, tags=["v1"], responses=_RESPONSES)
    _reading(routes)
    _more_reading(routes)

    @routes.post("/actions/{verb}", dependencies=[needs("operator")], summary="Plan an action, or do what was planned")
    async def act(request: Request, verb: Name, asked: ActionRequest) -> Response:
        who: Caller = request.state.who
        if verb not in ACTIONS:
            raise CheckpointNotFound(f"no action {verb[:40]!r}", hint=f"there are {', '.join(ACTIONS)}")
        if not who.may(ACTIONS[verb]):
            raise await refuse_role(request, ACTIONS[verb])
        acts = request.app.state.acts
        if asked.confirm:
            return json_response(
                (await run_in_threadpool(acts.execute, verb, asked.fields, who, asked.confirm))._asdict()
            )
        return json_response((await run_in_threadpool(acts.plan, verb, asked.fields, who))._asdict())

    @routes.get("/openapi.json", dependencies=[needs("viewer")], include_in_schema=False)
    def schema(request: Request) -> JSONResponse:
        return JSONResponse(request.app.openapi())

    return routes


def _reading(made: APIRouter) -> None:
    viewer = [needs("viewer")]

    @made.get("/stores", dependencies=viewer, summary="All followed stores")
    def stores(request: Request) -> Response:
        return json_response(request.app.state.index.stores())

    @made.get("/runs", dependencies=viewer, summary="Runs: failed ones first, then late, good and idle ones")
    def runs(
        request: Request, after: After = None, limit: Limit = 100, find: Find = "", state: Text = "", sort: Sort = ""
    ) -> Response:
        page = request.app.state.index.runs(after, limit, find, state, sort)
        return json_response(replace(page, rows=[pieces.short_run(row) for row in page.rows]))

    @made.get("/runs/{store}/{run}", dependencies=viewer, summary="One run")
    def run(request: Request, store: Name, run: Name) -> Response:
        return json_response(pieces.bounded_run(request.app.state.index.run(store, run)))

    @made.get("/runs/{store}/{run}/series", dependencies=viewer, summary="One metric of a run, at most 10,000 points")
    def series(request: Request, store: Name, run: Name, name: Metric, smooth: Smooth = 0) -> Response:
        known = request.app.state.index.series(store, run)
        if name not in known:
            raise CheckpointNotFound(f"run {run[:80]!r} has no metric {name[:80]!r}")
        return json_response(smoothed(known[name], smooth))

    @made.get("/runs/{store}/{run}/checkpoints", dependencies=viewer, summary="Checkpoints of a run, newest first")
    def checkpoints(request: Request, store: Name, run: Name, after: After = None, limit: Limit = 100) -> Response:
        return json_response(request.app.state.index.checkpoints(store, run, after, limit))

    @made.get(
        "/runs/{store}/{run}/checkpoints/{which:path}/values",
        dependencies=viewer,
        summary="Statistics of a tensor's values",
    )
    def values(request: Request, store: Name, run: Name, which: Name, path: Path400) -> Response:
        return json_response(request.app.state.index.values(store, run, which, path))

    @made.get(
        "/runs/{store}/{run}/checkpoints/{which:path}",
        dependencies=viewer,
        summary="One checkpoint, a piece of its tensors",
    )
    def checkpoint(
        request: Request, store: Name, run: Name, which: Name, after: After = None, limit: Limit = 100, find: Find = ""
    ) -> Response:
        return json_response(
            pieces.checkpoint_piece(request.app.state.index.checkpoint(store, run, which), after, limit, find)
        )

    @made.get(
        "/diff", dependencies=viewer, summary="Difference of two checkpoints in pieces, or the comparison's progress"
    )
    def diff(
        request: Request, a: Spec, b: Spec, after: After = None, limit: Limit = 100, changed: Changed = False
    ) -> Response:
        difference = request.app.state.index.diff(a, b)
        return json_response(
            difference if isinstance(difference, Working) else pieces.diff_piece(difference, after, limit, changed)
        )


def _more_reading(made: APIRouter) -> None:
    viewer = [needs("viewer")]

    @made.get("/lineage/{store}", dependencies=viewer, summary="The runs of a store, parents before their branches")
    def lineage(request: Request, store: Name, after: After = None, limit: Limit = 100) -> Response:
        return json_response(pieces.lineage_piece(request.app.state.index.lineage(store), after, limit))

    @made.get(
        "/storage/{store}",
        dependencies=viewer,
        summary="A store's size, and which retired checkpoints can be undeleted",
    )
    def storage(request: Request, store: Name) -> Response:
        return json_response(pieces.bounded_storage(request.app.state.index.storage(store)))

    @made.get("/incidents", dependencies=viewer, summary="Incidents, newest first")
    def incidents(request: Request, after: After = None, limit: Limit = 100) -> Response:
        page = request.app.state.index.incidents(after, limit)
        return json_response(replace(page, rows=[pieces.bare(incident) for incident in page.rows]))

    @made.get("/incidents/{store}/{run}/{which}", dependencies=viewer, summary="One incident, with its evidence")
    def incident(request: Request, store: Name, run: Name, which: Name) -> Response:
        return json_response(request.app.state.index.incident(store, run, which))

    @made.get("/risk", dependencies=viewer, summary="Machines that are likely to fail")
    def risk(request: Request) -> Response:
        return json_response(request.app.state.index.risk()[: pieces.LISTED_MAX])

    @made.get("/alerts", dependencies=viewer, summary="Alerts that fire now, critical ones first")
    def firing(request: Request) -> Response:
        return json_response(request.app.state.index.firing()[: pieces.LISTED_MAX])

    @made.get("/tasks", dependencies=viewer, summary="Tasks that actions started, newest first")
    def tasks(request: Request, limit: Limit = 100) -> Response:
        return json_response(
            [pieces.short_task(task.shown(time.time())) for task in request.app.state.tasks.all()[:limit]]
        )

    @made.get("/tasks/{task}", dependencies=viewer, summary="One task: its output and its result")
    def task(request: Request, task: Name) -> Response:
        return json_response(request.app.state.tasks.get(task).shown(time.time()))

    @made.get("/audit", dependencies=[needs("operator")], summary="Audit entries, newest first")
    def audit(request: Request, after: After = None, limit: Limit = 100) -> Response:
        return json_response(request.app.state.index.audit(after, limit))

    @made.get(
        "/settings",
        dependencies=[needs("admin")],
        summary="Tokens without their secrets, alert rules, and retention rules of tiers",
    )
    def settings(request: Request) -> Response:
        return json_response(request.app.state.index.settings())
