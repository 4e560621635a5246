"""Actions as pages: the first post shows what would be done, the second does it, if it is still the same.

What an action is, is said elsewhere: these pages are given something that plans and executes, as the command of the same name does.
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
    """What would be done, in words and rows, before anything is."""

    name: str
    says: str
    digest: str
    """Of what would be done: it is done only if it is the same when it is confirmed."""
    columns: Sequence[str] = ()
    rows: Sequence[Sequence[str]] = ()
    command: str = ""
    danger: bool = False


class ActionOutcome(NamedTuple):
    """How it ended."""

    ok: bool
    says: str
    details: str = ""
    task: str = ""
    """Of what goes on behind it: its page says how that ends."""


class Acts(Protocol):
    """Whoever plans and executes. Both raise ``RelightError``; ``execute`` writes the audit log before and after."""

    def plan(self, verb: str, fields: Mapping[str, str], who: Any) -> Planned:
        """What the action would do; changes nothing."""

    def execute(self, verb: str, fields: Mapping[str, str], who: Any, digest: str = "") -> ActionOutcome:
        """Do it, if it is still what had this digest."""


def router(needs: Callable[[str], Any]) -> APIRouter:
    """A route for each action, behind the role that it takes."""
    made = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    for verb, role in ACTIONS.items():
        made.add_api_route(f"/act/{verb}", _asked(verb), methods=["POST"], dependencies=[needs(role)], name=f"act_{verb}")
    return made


def _asked(verb: str) -> Callable[..., Any]:
    async def act(request: Request) -> Response:
        form = await request.form(max_files=0, max_fields=_FIELDS_MAX)
        given = {name: value for name, value in form.items() if isinstance(value, str)}
        if any(len(value) > _VALUE_MAX for value in given.values()):
            return shown(
                request,
                "error.html",
                "",
                name="That did not work",
                says=f"no field may be longer than {_VALUE_MAX} letters",
                todo="",
                status=422,
            )
        return await run_in_threadpool(_answer, request, verb, given)

    return act


def _answer(request: Request, verb: str, given: dict[str, str]) -> Response:
    """Ask, or do."""
    acts: Acts = request.app.state.acts
    fields = {name: value for name, value in given.items() if name not in _OURS}
    who, back = getattr(request.state, "who", None), _local(given.get("back") or request.headers.get("referer", ""))
    try:
        planned = acts.plan(verb, fields, who)
        confirmed = given.get("go", "")
        if confirmed and hmac.compare_digest(confirmed.encode(), planned.digest.encode()):
            done = acts.execute(verb, fields, who, confirmed)
            if done.task:
                return RedirectResponse(f"/tasks/{done.task}", 303)
            return shown(request, "done.html", "", name=planned.name, ok=done.ok, says=done.says, lines=done.details, back=back)
    except RelightError as error:
        return refused(request, error, 409)
    changed = "It has changed since it was shown: look again." if confirmed else ""
    return shown(
        request,
        "confirm.html",
        "",
        name=planned.name,
        says=planned.says,
        columns=planned.columns,
        lines=planned.rows,
        command=planned.command,
        danger=planned.danger,
        go=f"/act/{verb}",
        back=back,
        hidden=[*fields.items(), ("go", planned.digest), ("back", back)],
        said=changed,
        said_kind="warn",
    )


def _local(address: str) -> str:
    """An address of this server alone: its path and question."""
    try:
        found = urlsplit(address)
    except ValueError:
        return "/"
    path = found.path if found.path.startswith("/") and not found.path.startswith(("//", "/\\")) else "/"
    return path + (f"?{found.query}" if found.query else "")
