"""The pages: an address, a role that may see it, and what it shows. They ask the index alone, never a store.

Actions are forms: the first post shows what would be done, the second, behind it, does it; both are the server's (``serve/actions``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, NamedTuple

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse

from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.serve import pages_around as around
from relight.serve import pages_contents as contents
from relight.serve import pages_views as views
from relight.serve.pages_addresses import of_run, query, tabs_of
from relight.serve.pages_render import render
from relight.serve.scope import Caller, masked_error
from relight.serve.values import Statistics, Working

RUNS_A_PAGE, CHECKPOINTS_A_PAGE, ROWS_A_PAGE = 100, 50, 100
_TEXT_MAX = 400


class WebRoute(NamedTuple):
    """One address."""

    path: str
    role: str
    show: Callable[..., HTMLResponse]


PAGES: list[WebRoute] = []


def page(path: str, role: str = "viewer") -> Callable[[Callable[..., HTMLResponse]], Callable[..., HTMLResponse]]:
    """Put a function behind an address, for those who have at least that role."""

    def put(show: Callable[..., HTMLResponse]) -> Callable[..., HTMLResponse]:
        PAGES.append(WebRoute(path, role, show))
        return show

    return put


def router(needs: Callable[[str], Any]) -> APIRouter:
    """All pages as routes. ``needs(role)`` is the dependency that lets only that role through."""
    made = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    for one in PAGES:
        made.add_api_route(one.path, one.show, methods=["GET"], dependencies=[needs(one.role)], name=one.show.__name__)
    return made


def shown(request: Request, template: str, here: str, *, live: str = "", status: int = 200, **given: Any) -> HTMLResponse:
    """A page as an answer; ``live`` says which changes it wants to hear of."""
    address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    who: Caller | None = getattr(request.state, "who", None)
    usual = {
        "events": f"/events{live}" if live else "",
        "address": address,
        "who": who,
        "csrf": getattr(request.state, "csrf", ""),
    }
    return HTMLResponse(render(template, here, **usual | given), status_code=status)


def allowed(request: Request, actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of these actions, what whoever asks may do."""
    who: Caller | None = getattr(request.state, "who", None)
    return [one for one in actions if who is not None and who.may(views.ACTIONS[one["verb"]])]


@page("/")
def overview(request: Request, after: str = "") -> HTMLResponse:
    """All runs."""
    index = request.app.state.index
    found = index.runs(after[:_TEXT_MAX] or None, RUNS_A_PAGE)
    context = views.overview(found.rows, index.stores(), time.time())
    return shown(request, "overview.html", "/", live="?", **context, more="/" + query(after=found.next) if found.next else "")


@page("/runs/{store}/{run}")
def run(request: Request, store: str, run: str, after: str = "") -> HTMLResponse:
    """One run."""
    index = request.app.state.index
    detail, found = index.run(store, run), index.checkpoints(store, run, after[:_TEXT_MAX] or None, CHECKPOINTS_A_PAGE)
    here = of_run(store, run)
    return shown(
        request,
        "run.html",
        here,
        live=query(store=store, run=run),
        **views.run(detail, found.rows, time.time()),
        tabs=tabs_of(store, run),
        crumbs=[("Runs", "/")],
        more=here + query(after=found.next) + "#checkpoints" if found.next else "",
        actions=allowed(request, views.actions_of_run(store, run)),
    )


@page("/runs/{store}/{run}/checkpoints/{which:path}")
def checkpoint(request: Request, store: str, run: str, which: str, find: str = "", tensor: str = "", after: str = "") -> HTMLResponse:
    """One checkpoint; of one of its tensors its values, too, if it is asked for."""
    index, tensor = request.app.state.index, tensor[:_TEXT_MAX]
    detail = index.checkpoint(store, run, which)
    picked = contents.one_tensor(detail, tensor, _values(index, store, run, detail.row.id, tensor)) if tensor else None
    waiting = bool(picked and picked["waiting"]) or not detail.tensors
    return shown(
        request,
        "checkpoint.html",
        of_run(store, run),
        live="?" if waiting else "",
        **contents.checkpoint(store, run, detail, find[:_TEXT_MAX], time.time(), after),
        one_tensor=picked,
        tabs=tabs_of(store, run),
        crumbs=[("Runs", "/"), (run, of_run(store, run))],
        actions=allowed(request, views.actions_of_checkpoint(store, run, detail.row.id)),
    )


def _values(index: Any, store: str, run: str, which: str, tensor: str) -> Statistics | Working | str:
    """What there is of them, or in words why there is nothing: the rest of the page is there all the same."""
    try:
        found: Statistics | Working = index.values(store, run, which, tensor)
    except RelightError as error:
        return str(masked_error(error))
    return found


@page("/compare")
def compare(request: Request, a: str = "", b: str = "") -> HTMLResponse:
    """Two checkpoints: what differs."""
    a, b = a[:_TEXT_MAX], b[:_TEXT_MAX]
    context: dict[str, Any] = {"found": False, "waiting": "", "wrong": ""}
    if a and b:
        try:
            context |= contents.compared(request.app.state.index.diff(a, b))
        except (CheckpointNotFound, ConfigError) as error:
            return shown(request, "compare.html", "/compare", a=a, b=b, status=404, **context | {"wrong": str(masked_error(error))})
    live = "?" if context["waiting"] else ""
    return shown(request, "compare.html", "/compare", live=live, a=a, b=b, **context)


@page("/lineage")
def lineage(request: Request) -> HTMLResponse:
    """Where runs come from."""
    index = request.app.state.index
    return shown(
        request,
        "lineage.html",
        "/lineage",
        live="?",
        stores=[around.lineage(one.name, index.lineage(one.id), one.id) for one in index.stores()],
    )


@page("/storage")
def storage(request: Request) -> HTMLResponse:
    """What stores hold, when they are full, what goes next."""
    index, now = request.app.state.index, time.time()
    stores = [around.storage(one, index.storage(one.id), now) for one in index.stores()]
    return shown(request, "storage.html", "/storage", live="?", stores=stores)


@page("/incidents")
def incidents(request: Request, after: str = "") -> HTMLResponse:
    """What has happened to runs."""
    found = request.app.state.index.incidents(after[:_TEXT_MAX] or None, ROWS_A_PAGE)
    more = "/incidents" + query(after=found.next) if found.next else ""
    return shown(request, "incidents.html", "/incidents", live="?", **around.incidents(found.rows, time.time()), more=more)


@page("/incidents/{store}/{run}/{which}")
def incident(request: Request, store: str, run: str, which: str) -> HTMLResponse:
    """One incident, with its evidence."""
    found = request.app.state.index.incident(store, run, which)
    return shown(
        request,
        "incident.html",
        "/incidents",
        **around.incident(found, time.time()),
        crumbs=[("Incidents", "/incidents"), (run, of_run(store, run))],
    )


@page("/risk")
def risk(request: Request) -> HTMLResponse:
    """Machines that look like failing."""
    return shown(request, "risk.html", "/risk", live="?", rows=around.risk(request.app.state.index.risk(), time.time()))


@page("/tasks/{task}")
def task(request: Request, task: str) -> HTMLResponse:
    """Something that was begun and takes its time: what it says, and how it ended."""
    found = request.app.state.tasks.get(task)
    context = views.task(found.shown(time.time()), time.time())
    live = query(store=found.store, run=found.run) if found.done is None else ""
    back = of_run(found.store, found.run)
    crumbs = [("Runs", "/"), (found.run, back)]
    return shown(request, "task.html", back, live=live, **context, tabs=tabs_of(found.store, found.run), crumbs=crumbs)


@page("/audit", "operator")
def audit(request: Request, after: str = "") -> HTMLResponse:
    """Who did what."""
    found = request.app.state.index.audit(after[:_TEXT_MAX] or None, ROWS_A_PAGE)
    return shown(
        request,
        "audit.html",
        "/audit",
        rows=around.audit(found.rows, time.time()),
        more="/audit" + query(after=found.next) if found.next else "",
    )


@page("/settings", "admin")
def settings(request: Request) -> HTMLResponse:
    """Who has a token, what is alerted on, what runs keep."""
    return shown(request, "settings.html", "/settings", **around.settings(request.app.state.index.settings(), time.time()))


def refused(request: Request, error: RelightError, status: int) -> HTMLResponse:
    """An error of ours as a page: what, why, what to do."""
    return shown(
        request, "error.html", "", name="Not found" if status == 404 else "That did not work", says=str(masked_error(error)), todo="",
        status=status,
    )  # fmt: skip
