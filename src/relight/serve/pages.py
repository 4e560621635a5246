"""The pages: for each its address, the role that it needs, and the function that renders it. They query the index, never a store.

Actions are forms: the first POST shows the plan, the second executes it (``serve/actions``).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

from fastapi import APIRouter, Query, Request
from fastapi.responses import HTMLResponse

from relight.errors import CheckpointNotFound, ConfigError, RelightError
from relight.serve import pages_around as around
from relight.serve import pages_contents as contents
from relight.serve import pages_views as views
from relight.serve.pages_addresses import of_log, of_run, query, tabs_of
from relight.serve.pages_api import rows as api_rows
from relight.serve.pages_charts import RUNS_MAX as RUNS_IN_CHARTS
from relight.serve.pages_charts import RunSeries, options_of
from relight.serve.pages_charts import charts as charts_of
from relight.serve.pages_incident import incident as incident_of
from relight.serve.pages_render import render
from relight.serve.pages_runs import overview as runs_of
from relight.serve.scope import Caller, masked_error
from relight.serve.values import Statistics, Working

RUNS_A_PAGE, CHECKPOINTS_A_PAGE, ROWS_A_PAGE = 100, 50, 100
_TEXT_MAX = 400


class WebRoute(NamedTuple):
    """Address, role and function of a page."""

    path: str
    role: str
    show: Callable[..., HTMLResponse]


PAGES: list[WebRoute] = []
"""Filled by the decorator as modules are imported."""


def page(path: str, role: str = "viewer") -> Callable[[Callable[..., HTMLResponse]], Callable[..., HTMLResponse]]:
    """Register a function as the page at an address, for callers with at least that role."""

    def put(show: Callable[..., HTMLResponse]) -> Callable[..., HTMLResponse]:
        PAGES.append(WebRoute(path, role, show))
        return show

    return put


def router(needs: Callable[[str], Any]) -> APIRouter:
    """Return all pages as routes. ``needs(role)`` returns the dependency that admits callers with at least that role."""
    routes = APIRouter(include_in_schema=False, default_response_class=HTMLResponse)
    for route in PAGES:
        routes.add_api_route(
            route.path, route.show, methods=["GET"], dependencies=[needs(route.role)], name=route.show.__name__
        )
    return routes


def shown(
    request: Request, template: str, here: str, *, live: str = "", status: int = 200, **given: Any
) -> HTMLResponse:
    """Return a page as a response. ``live``: the query of its event stream, which selects the changes that reload it; empty for none."""
    address = request.url.path + (f"?{request.url.query}" if request.url.query else "")
    usual = {
        "events": f"/events{live}" if live else "",
        "address": address,
        "who": request.state.who,
        "csrf": request.state.csrf,
        "firing": around.firing(request.app.state.index.firing(), time.time()) if request.state.who is not None else [],
    }
    return HTMLResponse(render(template, here, **usual | given), status_code=status)


def allowed(request: Request, actions: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return those of ``actions`` that the caller's role allows."""
    who: Caller | None = request.state.who
    return [candidate for candidate in actions if who is not None and who.may(views.ACTIONS[candidate["verb"]])]


@page("/")
def overview(request: Request, after: str = "", find: str = "", state: str = "", sort: str = "") -> HTMLResponse:
    """Show all runs, or those that a form selects, sorted by a column."""
    index, asked = request.app.state.index, {"find": find[:_TEXT_MAX], "state": state[:40], "sort": sort[:_TEXT_MAX]}
    page_of_runs = index.runs(after[:_TEXT_MAX] or None, RUNS_A_PAGE, **asked)
    return shown(
        request,
        "overview.html",
        "/",
        live="?",
        **runs_of(page_of_runs.rows, index.stores(), asked, time.time()),
        more="/" + query(**asked, after=page_of_runs.next) if page_of_runs.next else "",
    )


@page("/charts")
def charts(
    request: Request,
    run: Annotated[list[str], Query()] = [],  # noqa: B006 (FastAPI copies it)
    axis: str = "",
    scale: str = "",
    smooth: str = "",
    find: str = "",
) -> HTMLResponse:
    """Show metrics of several runs in the same charts."""
    index = request.app.state.index
    chosen = [name[:_TEXT_MAX].partition("/")[::2] for name in dict.fromkeys(run)][:RUNS_IN_CHARTS]
    runs = [RunSeries(store, name, index.series(store, name)) for store, name in chosen]
    choices = [
        {
            "value": f"{row.store}/{row.run}",
            "run": row.run,
            "store": row.store,
            "chosen": (row.store, row.run) in chosen,
        }
        for row in index.runs(None, RUNS_A_PAGE).rows
    ]
    return shown(
        request,
        "charts.html",
        "/charts",
        live="?" if runs else "",
        **charts_of(runs, options_of(axis, scale, smooth, find[:_TEXT_MAX])),
        choices=choices,
        hidden=[("run", f"{store}/{name}") for store, name in chosen],
        runs=len(runs),
    )


@page("/runs/{store}/{run}")
def run(
    request: Request,
    store: str,
    run: str,
    after: str = "",
    axis: str = "",
    scale: str = "",
    smooth: str = "",
    find: str = "",
) -> HTMLResponse:
    """Show one run."""
    index = request.app.state.index
    detail, page_of_checkpoints = (
        index.run(store, run),
        index.checkpoints(store, run, after[:_TEXT_MAX] or None, CHECKPOINTS_A_PAGE),
    )
    here = of_run(store, run)
    return shown(
        request,
        "run.html",
        here,
        live=query(store=store, run=run),
        **views.run(detail, page_of_checkpoints.rows, time.time()),
        **charts_of(
            [RunSeries(store, run, index.series(store, run))],
            options_of(axis, scale, smooth, find[:_TEXT_MAX]),
            views.marks_of(detail, page_of_checkpoints.rows),
        ),
        hidden=[],
        plot_with="/charts" + query(run=f"{store}/{detail.row.run}"),
        tabs=tabs_of(store, run),
        crumbs=[("Runs", "/")],
        more=here + query(after=page_of_checkpoints.next) + "#checkpoints" if page_of_checkpoints.next else "",
        actions=allowed(request, views.actions_of_run(store, detail.row)),
    )


@page("/runs/{store}/{run}/log")
def log(request: Request, store: str, run: str, after: str = "") -> HTMLResponse:
    """Show the records of a run's log."""
    records = request.app.state.index.log(store, run, after[:_TEXT_MAX] or None, ROWS_A_PAGE)
    return shown(
        request,
        "log.html",
        of_log(store, run),
        live=query(store=store, run=run),
        run=run,
        rows=around.log(records.rows, time.time()),
        tabs=tabs_of(store, run),
        crumbs=[("Runs", "/"), (run, of_run(store, run))],
        more=of_log(store, run, after=records.next) if records.next else "",
    )


@page("/runs/{store}/{run}/checkpoints/{which:path}")
def checkpoint(
    request: Request, store: str, run: str, which: str, find: str = "", tensor: str = "", after: str = ""
) -> HTMLResponse:
    """Show one checkpoint, and statistics of the tensor that ``tensor`` names."""
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
        actions=allowed(request, views.actions_of_checkpoint(store, run, detail)),
    )


def _values(index: Any, store: str, run: str, which: str, tensor: str) -> Statistics | Working | str:
    """Return a tensor's statistics, the progress of the job that reads them, or an error's text: the page is shown in any case."""
    try:
        values: Statistics | Working = index.values(store, run, which, tensor)
    except RelightError as error:
        return str(masked_error(error))
    return values


@page("/compare")
def compare(request: Request, a: str = "", b: str = "") -> HTMLResponse:
    """Show the difference of two checkpoints."""
    a, b = a[:_TEXT_MAX], b[:_TEXT_MAX]
    context: dict[str, Any] = {"found": False, "waiting": "", "wrong": "", "sides": []}
    status, index = 200, request.app.state.index
    if a and b:
        try:
            context["sides"] = contents.sides(index.sides(a, b))
            context |= contents.compared(index.diff(a, b))
        except RelightError as error:
            status = 404 if isinstance(error, CheckpointNotFound | ConfigError) else 422
            context["wrong"] = str(masked_error(error))
            if status == 422:
                context["sides"] = contents.sides(index.sides(a, b))  # the comparison may have met damage
    live = "?" if context["waiting"] else ""
    return shown(request, "compare.html", "/compare", live=live, a=a, b=b, status=status, **context)


@page("/lineage")
def lineage(request: Request) -> HTMLResponse:
    """Show the runs of each store with their branches."""
    index = request.app.state.index
    return shown(
        request,
        "lineage.html",
        "/lineage",
        live="?",
        stores=[around.lineage(row.name, index.lineage(row.id), row.id) for row in index.stores()],
    )


@page("/storage")
def storage(request: Request) -> HTMLResponse:
    """Show each store's size, when it will be full, and which retired checkpoints can be undeleted."""
    index, now = request.app.state.index, time.time()
    stores = [around.storage(row, index.storage(row.id), now) for row in index.stores()]
    return shown(request, "storage.html", "/storage", live="?", stores=stores)


@page("/incidents")
def incidents(request: Request, after: str = "") -> HTMLResponse:
    """Show incidents of all runs."""
    page_of_incidents = request.app.state.index.incidents(after[:_TEXT_MAX] or None, ROWS_A_PAGE)
    more = "/incidents" + query(after=page_of_incidents.next) if page_of_incidents.next else ""
    return shown(
        request,
        "incidents.html",
        "/incidents",
        live="?",
        **around.incidents(page_of_incidents.rows, time.time()),
        more=more,
    )


@page("/incidents/{store}/{run}/{which}")
def incident(request: Request, store: str, run: str, which: str) -> HTMLResponse:
    """Show one incident with its evidence."""
    row = request.app.state.index.incident(store, run, which)
    return shown(
        request,
        "incident.html",
        "/incidents",
        **incident_of(row, time.time()),
        crumbs=[("Incidents", "/incidents"), (run, of_run(store, run))],
    )


@page("/risk")
def risk(request: Request) -> HTMLResponse:
    """Show machines that are likely to fail."""
    return shown(request, "risk.html", "/risk", live="?", rows=around.risk(request.app.state.index.risk(), time.time()))


@page("/tasks/{task}")
def task(request: Request, task: str) -> HTMLResponse:
    """Show a task: its output and its result."""
    server_task = request.app.state.tasks.get(task)
    context = views.task(server_task.shown(time.time()), time.time())
    live = query(store=server_task.store, run=server_task.run) if server_task.done is None else ""
    back = of_run(server_task.store, server_task.run)
    crumbs = [("Runs", "/"), (server_task.run, back)]
    return shown(
        request,
        "task.html",
        back,
        live=live,
        **context,
        tabs=tabs_of(server_task.store, server_task.run),
        crumbs=crumbs,
    )


@page("/api")
def api_page(request: Request) -> HTMLResponse:
    """Show the addresses of the API."""
    return shown(
        request, "api.html", "/api", rows=api_rows(request.app.openapi()), origin=str(request.base_url).rstrip("/")
    )


@page("/audit", "operator")
def audit(request: Request, after: str = "") -> HTMLResponse:
    """Show the audit log."""
    page_of_entries = request.app.state.index.audit(after[:_TEXT_MAX] or None, ROWS_A_PAGE)
    return shown(
        request,
        "audit.html",
        "/audit",
        rows=around.audit(page_of_entries.rows, time.time()),
        more="/audit" + query(after=page_of_entries.next) if page_of_entries.next else "",
    )


@page("/settings", "admin")
def settings(request: Request) -> HTMLResponse:
    """Show tokens, alert rules and retention rules."""
    return shown(
        request, "settings.html", "/settings", **around.settings(request.app.state.index.settings(), time.time())
    )


def refused(request: Request, error: RelightError, status: int) -> HTMLResponse:
    """Return an error as a page."""
    return shown(
        request,
        "error.html",
        "",
        name="Not found" if status == 404 else "Request failed",
        message=str(masked_error(error)),
        todo="",
        status=status,
    )
