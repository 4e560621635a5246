"""The API, ``/api/v1``: what pages show as JSON, and actions in two steps. Each route says its role in its declaration."""

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
from relight.serve.pages_views import ACTIONS
from relight.serve.scope import Caller, masked_error
from relight.serve.values import Working

PREFIX = "/api/v1"
LIMIT_MAX = 500
Limit = Annotated[int, Query(ge=1, le=LIMIT_MAX, description="How many rows at most.")]
After = Annotated[str | None, Query(max_length=400, description="What the piece before said under next.")]
Name = Annotated[str, Path(max_length=255)]
Path400 = Annotated[str, Query(max_length=400, description="A tensor's path, as its checkpoint lists it.")]
Find = Annotated[str, Query(max_length=400, description="A part of the path of the tensors that are wanted.")]
Changed = Annotated[bool, Query(description="Leave out tensors that are the same.")]
Spec = Annotated[str, Query(max_length=400, description="A checkpoint: [STORE/]RUN@WHICH.")]


class ActionRequest(BaseModel):
    """An action. Without ``confirm`` the answer is the plan; with the plan's digest it is done, if it is still the same."""

    model_config = ConfigDict(extra="forbid", strict=True)
    fields: dict[Annotated[str, Field(max_length=40)], Annotated[str, Field(max_length=400)]] = Field(max_length=12)
    confirm: str = Field(default="", max_length=64)


class Problem(BaseModel):
    """What was wrong: ``kind`` for programs, the rest for people."""

    kind: str
    what: str
    where: str = ""
    hint: str = ""
    details: list[str] = []


class ProblemAnswer(BaseModel):
    """Every answer that is no answer."""

    error: Problem


_PROBLEMS = {
    400: "Not how this server is asked", 401: "No valid token", 403: "Not with this role", 404: "Not there, or not yours to see",
    405: "No such method here", 409: "It has changed since it was planned", 413: "Too long", 415: "Not application/json",
    422: "This cannot be asked so", 429: "Too often", 503: "The store did not answer",
}  # fmt: skip
_RESPONSES: dict[int | str, dict[str, Any]] = {status: {"description": says, "model": ProblemAnswer} for status, says in _PROBLEMS.items()}


def status_of(error: RelightError) -> int:
    """Which number of HTTP an error of ours is."""
    if isinstance(error, CheckpointNotFound):
        return 404
    if isinstance(error, ConfigError):
        return 422
    if isinstance(error, StoreUnavailable):
        return 503
    return 409 if isinstance(error, Fenced) else 422


def json_response(value: Any, status: int = 200) -> Response:
    """Any of our values as JSON; numbers that JSON lacks are null."""
    return Response(shown_json(msgspec.json.encode(value, enc_hook=str)), status, media_type="application/json")


def error_answer(error: RelightError) -> JSONResponse:
    """What, where, and what to do; without names of runs that the asker does not reach."""
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
    """Text without what cannot be encoded."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {name: _ascii(one) for name, one in value.items()}
    return (
        [_ascii(one) for one in value]
        if isinstance(value, list)
        else value
        if not isinstance(value, float) or math.isfinite(value)
        else None
    )


def router() -> APIRouter:
    """All of it."""
    made = APIRouter(prefix=PREFIX, tags=["v1"], responses=_RESPONSES)
    _reading(made)
    _more_reading(made)

    @made.post("/actions/{verb}", dependencies=[needs("operator")], summary="Plan an action, or do what was planned")
    async def act(request: Request, verb: Name, asked: ActionRequest) -> Response:
        who: Caller = request.state.who
        if verb not in ACTIONS:
            raise CheckpointNotFound(f"no action {verb[:40]!r}", hint=f"there are {', '.join(ACTIONS)}")
        if not who.may(ACTIONS[verb]):
            raise await refuse_role(request, ACTIONS[verb])
        acts = request.app.state.acts
        if asked.confirm:
            return json_response((await run_in_threadpool(acts.execute, verb, asked.fields, who, asked.confirm))._asdict())
        return json_response((await run_in_threadpool(acts.plan, verb, asked.fields, who))._asdict())

    @made.get("/openapi.json", dependencies=[needs("viewer")], include_in_schema=False)
    def schema(request: Request) -> JSONResponse:
        return JSONResponse(request.app.openapi())

    return made


def _reading(made: APIRouter) -> None:
    viewer = [needs("viewer")]

    @made.get("/stores", dependencies=viewer, summary="All stores that are followed")
    def stores(request: Request) -> Response:
        return json_response(request.app.state.index.stores())

    @made.get("/runs", dependencies=viewer, summary="Runs, those first that need somebody")
    def runs(request: Request, after: After = None, limit: Limit = 100) -> Response:
        return json_response(request.app.state.index.runs(after, limit))

    @made.get("/runs/{store}/{run}", dependencies=viewer, summary="One run")
    def run(request: Request, store: Name, run: Name) -> Response:
        return json_response(pieces.bounded_run(request.app.state.index.run(store, run)))

    @made.get("/runs/{store}/{run}/checkpoints", dependencies=viewer, summary="Its checkpoints, the newest first")
    def checkpoints(request: Request, store: Name, run: Name, after: After = None, limit: Limit = 100) -> Response:
        return json_response(request.app.state.index.checkpoints(store, run, after, limit))

    @made.get("/runs/{store}/{run}/checkpoints/{which:path}/values", dependencies=viewer, summary="A tensor in numbers")
    def values(request: Request, store: Name, run: Name, which: Name, path: Path400) -> Response:
        return json_response(request.app.state.index.values(store, run, which, path))

    @made.get("/runs/{store}/{run}/checkpoints/{which:path}", dependencies=viewer, summary="One checkpoint, a piece of its tensors")
    def checkpoint(
        request: Request, store: Name, run: Name, which: Name, after: After = None, limit: Limit = 100, find: Find = ""
    ) -> Response:
        return json_response(pieces.checkpoint_piece(request.app.state.index.checkpoint(store, run, which), after, limit, find))

    @made.get("/diff", dependencies=viewer, summary="A piece of what differs between two checkpoints, or how far that is")
    def diff(request: Request, a: Spec, b: Spec, after: After = None, limit: Limit = 100, changed: Changed = False) -> Response:
        found = request.app.state.index.diff(a, b)
        return json_response(found if isinstance(found, Working) else pieces.diff_piece(found, after, limit, changed))


def _more_reading(made: APIRouter) -> None:
    viewer = [needs("viewer")]

    @made.get("/lineage/{store}", dependencies=viewer, summary="The runs of a store, parents before their branches")
    def lineage(request: Request, store: Name, after: After = None, limit: Limit = 100) -> Response:
        return json_response(pieces.lineage_piece(request.app.state.index.lineage(store), after, limit))

    @made.get("/storage/{store}", dependencies=viewer, summary="What a store holds, and what goes next")
    def storage(request: Request, store: Name) -> Response:
        return json_response(pieces.bounded_storage(request.app.state.index.storage(store)))

    @made.get("/incidents", dependencies=viewer, summary="What happened to runs, the newest first")
    def incidents(request: Request, after: After = None, limit: Limit = 100) -> Response:
        found = request.app.state.index.incidents(after, limit)
        return json_response(replace(found, rows=[pieces.bare(one) for one in found.rows]))

    @made.get("/incidents/{store}/{run}/{which}", dependencies=viewer, summary="One incident, with its evidence")
    def incident(request: Request, store: Name, run: Name, which: Name) -> Response:
        return json_response(request.app.state.index.incident(store, run, which))

    @made.get("/risk", dependencies=viewer, summary="Machines that look like failing")
    def risk(request: Request) -> Response:
        return json_response(request.app.state.index.risk()[: pieces.LISTED_MAX])

    @made.get("/tasks", dependencies=viewer, summary="What actions have begun that takes its time, the newest first")
    def tasks(request: Request, limit: Limit = 100) -> Response:
        return json_response([pieces.short_task(one.shown(time.time())) for one in request.app.state.tasks.all()[:limit]])

    @made.get("/tasks/{task}", dependencies=viewer, summary="One of them: what it says, and how it ended")
    def task(request: Request, task: Name) -> Response:
        return json_response(request.app.state.tasks.get(task).shown(time.time()))

    @made.get("/audit", dependencies=[needs("operator")], summary="Who did what, the newest first")
    def audit(request: Request, after: After = None, limit: Limit = 100) -> Response:
        return json_response(request.app.state.index.audit(after, limit))

    @made.get("/settings", dependencies=[needs("admin")], summary="Tokens without their secrets, and what tiers keep")
    def settings(request: Request) -> Response:
        return json_response(request.app.state.index.settings())
