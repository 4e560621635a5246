"""Pages of actions: the first POST shows the plan, the second executes it unless the plan has changed.

The actions themselves are in ``serve/actions``.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol
from urllib.parse import urlsplit

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from starlette.concurrency import run_in_threadpool

from relight.errors import RelightError
from relight.serve.pages import refused, shown
from relight.serve.pages_views import ACTIONS as ACTIONS

_FIELDS_MAX, _VALUE_MAX = 12, 400
_OURS = ("csrf", "go", "back")


class Planned(NamedTuple):
    """Plan of an action, in words and rows."""

    name: str
    says: str
    digest: str
    """Hash of the plan. The action is executed only if the plan still has this digest when the user confirms."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    command: str = ""
    danger: bool = False


class ActionOutcome(NamedTuple):
    """Result of an action."""

    ok: bool
    says: str
    details: str = ""
    task: str = ""
    """Id of the task that the action started; its page shows progress and result. Empty if the action is complete."""


class Acts(Protocol):
    """Planner and executor of actions. Both methods raise ``RelightError``. ``execute`` writes to the audit log before and after."""

    def plan(self, verb: str, fields: Mapping[str, str], who: Any) -> Planned:
        """Return what the action would do. Change nothing."""

    def execute(self, verb: str, fields: Mapping[str, str], who: Any, digest: str = "") -> ActionOutcome:
        """Execute the action. Raise if its plan no longer has this digest."""


def router(needs: Callable[[str], Any]) -> APIRouter:
    """Return a route for each action, with the role that it needs."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    for verb, role in ACTIONS.items():
        routes.add_api_route(
            f"/act/{verb}", _asked(verb), methods=["POST"], dependencies=[needs(role)], name=f"act_{verb}"
        )
    return routes


def _asked(verb: str) -> Callable[..., Any]:
    async def act(request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=_FIELDS_MAX)
        fields = {name: value for name, value in form.items() if isinstance(value, str)}
        if any(len(value) > _VALUE_MAX for value in fields.values()):
            return shown(
                request,
                "error.html",
                "",
                name="Request failed",
                message=f"a field has at most {_VALUE_MAX} characters",
                todo="",
                status=422,
            )
        return await run_in_threadpool(_answer, request, verb, fields)

    return act


def _answer(request: Request, verb: str, given: dict[str, str]) -> Response:
    """Execute a confirmed action, else show its plan."""
    acts: Acts = request.app.state.acts
    fields = {name: value for name, value in given.items() if name not in _OURS}
    who, back = request.state.who, _local(given.get("back") or request.headers.get("referer", ""))
    try:
        planned = acts.plan(verb, fields, who)
        confirmed = given.get("go", "")
        if confirmed and hmac.compare_digest(confirmed.encode(), planned.digest.encode()):
            outcome = acts.execute(verb, fields, who, confirmed)
            if outcome.task:
                return RedirectResponse(f"/tasks/{outcome.task}", 303)
            return shown(
                request,
                "done.html",
                "",
                name=planned.name,
                ok=outcome.ok,
                message=outcome.says,
                lines=outcome.details,
                back=back,
            )
    except RelightError as error:
        return refused(request, error, 409)
    changed = "The plan has changed since it was shown: check it again." if confirmed else ""
    return shown(
        request,
        "confirm.html",
        "",
        name=planned.name,
        message=planned.says,
        columns=planned.columns,
        lines=planned.rows,
        command=planned.command,
        danger=planned.danger,
        go=f"/act/{verb}",
        back=back,
        hidden=[*fields.items(), ("go", planned.digest), ("back", back)],
        notice=changed,
        notice_kind="warn",
    )


def _local(address: str) -> str:
    """Return path and query of an address on this server; ``/`` for any other address."""
    try:
        parts = urlsplit(address)
    except ValueError:
        return "/"
    path = parts.path if parts.path.startswith("/") and not parts.path.startswith(("//", "/\\")) else "/"
    return path + (f"?{parts.query}" if parts.query else "")
