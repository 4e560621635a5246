"""``docs/http-api.md`` is made from the routes and types of the code. ``python tests/house/test_http_api_page.py`` writes it again."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import types
import typing
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fastapi.routing import APIRoute

from relight.audit.facts import FIELDS as AUDIT_FIELDS
from relight.serve import actions, api, tasks, values
from relight.serve.actions import FIELDS
from relight.serve.index import Index
from relight.serve.pages_views import ACTIONS

PAGE = Path(__file__).parents[2] / "docs" / "http-api.md"
OTHERS: dict[str, Any] = {
    "series": values.SeriesDetail, "lineage": values.ListPage[values.LineageRow], "tasks": list[tasks.ServerTask], "task": tasks.ServerTask, "act": actions.Planned | actions.ActionOutcome,
}  # fmt: skip
"""Answers of routes that are not the index's method of the same name unchanged."""
AUDIT_WORDS = {
    "who": "the name of the person or token", "role": "the role that the action was asked with; empty: a command of the machine's own user",
    "token": "the id of the token; empty: none was used", "what": "the action: a command, or the verb of a page or of the API",
    "on": "what it was done to: `STORE/RUN@WHICH`, or a token's id", "run": "the run", "checkpoint": "the checkpoint's id",
    "before": "what the changed value was, such as the checkpoint that a tag was on", "after": "what it is then", "why": "the reason that was given",
}  # fmt: skip


def routes() -> list[APIRoute]:
    """All that the schema lists."""
    return [route for route in api.router().routes if isinstance(route, APIRoute) and route.include_in_schema]


def answer_of(route: APIRoute) -> Any:
    """Return the type of a route's answer."""
    name = route.endpoint.__name__
    return OTHERS.get(name) or typing.get_type_hints(getattr(Index, name))["return"]


def shown(kind: Any) -> str:
    """A type, as a reader of JSON sees it; our own ones link to their table."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return " or ".join(dict.fromkeys(shown(choice) for choice in inner))
    if isinstance(kind, typing.TypeVar):
        return "row"
    if origin is values.ListPage:
        return f"[ListPage](#listpage) of {shown(inner[0])}"
    if inspect.isclass(kind) and origin is None and named(kind):
        return f"[{kind.__name__}](#{kind.__name__.lower()})"
    if origin is not None and issubclass(origin, typing.Mapping):
        return f"object of {shown(inner[1])}"
    if origin is tuple and Ellipsis not in inner:
        return f"[{', '.join(shown(element) for element in inner)}]"
    if origin is not None:
        return f"list of {shown(inner[0])}"
    return {str: "text", int: "integer", float: "number", bool: "true or false", type(None): "null", Any: "any"}.get(
        kind, "any"
    )


def named(kind: Any) -> bool:
    """Whether a type has a table of its own."""
    return dataclasses.is_dataclass(kind) or hasattr(kind, "_fields") or kind is tasks.ServerTask


def mentioned(kind: Any) -> Iterator[Any]:
    """All types with a table that a type leads to, itself first."""
    if typing.get_origin(kind) is None and inspect.isclass(kind) and named(kind):
        yield kind
        for inner in fields_of(kind).values():
            yield from mentioned(inner)
    if typing.get_origin(kind) is values.ListPage:
        yield values.ListPage
    for inner in typing.get_args(kind):
        yield from mentioned(inner)


def fields_of(kind: Any) -> dict[str, Any]:
    """The fields of a body, and their types."""
    if kind is tasks.ServerTask:
        names = tasks.ServerTask("id", "verb", "store", "run", "who", 0.0).shown(0.0)
        return {**dict.fromkeys(names, str), "began": float, "seconds": float, "lines": list[str]}
    hints = typing.get_type_hints(kind)
    return {
        name: hints[name]
        for name in (kind._fields if hasattr(kind, "_fields") else [field.name for field in dataclasses.fields(kind)])
    }


def words_of(kind: Any) -> tuple[str, dict[str, str]]:
    """Return the docstring of a type, and those below its fields."""
    body = ast.parse(inspect.getsource(kind)).body[0]
    assert isinstance(body, ast.ClassDef)
    words, last = dict[str, str](), ""
    for node in body.body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            last = node.target.id
        elif (
            last
            and isinstance(node, ast.Expr)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            words[last] = " ".join(node.value.value.split())
            last = ""
        else:
            last = ""
    doc = " ".join((inspect.getdoc(kind) or "").replace("``", "`").split())
    return doc, {name: text.replace("``", "`") for name, text in words.items()}


def written() -> str:
    """Return the page's text from the code."""
    rows = []
    for route in routes():
        asked = [f"`{param.name}`" for param in route.dependant.query_params]
        role = next(dependency.dependency.role for dependency in route.dependencies)  # type: ignore[union-attr]
        method = next(iter(route.methods))
        rows.append(
            f"| {method} | `{route.path}` | {role} | {' '.join(asked)} | {shown(answer_of(route))} | {route.summary} |"
        )
    kinds = list(dict.fromkeys(kind for route in routes() for kind in mentioned(answer_of(route))))
    blocks = []
    for kind in sorted(kinds, key=lambda kind: kind.__name__):
        doc, words = words_of(kind)
        lines = [f"| `{name}` | {shown(inner)} | {words.get(name, '')} |" for name, inner in fields_of(kind).items()]
        blocks.append("\n".join([f"### {kind.__name__}", doc, "", "| field | type | |", "|---|---|---|", *lines]))
    verbs = [
        f"| `{verb}` | {ACTIONS[verb]} | {' '.join(f'`{name}`' for name in names)} |" for verb, names in FIELDS.items()
    ]
    audited = [f"| `{name}` | {AUDIT_WORDS[name]} |" for name in AUDIT_FIELDS]
    params = {param.name: param.field_info.description for route in routes() for param in route.dependant.query_params}
    asks = [f"| `{name}` | {text} |" for name, text in params.items()]
    return "\n".join([
        "# The HTTP API", "",
        "`relight serve` answers below `/api/v1` with JSON. Send a token as `Authorization: Bearer …` ([the dashboard](dashboard.md#start-it)).",
        "This page is made from the code; `/api/v1/openapi.json` describes paths and parameters for programs. Times are seconds since 1970 or",
        "ISO text. A number that JSON lacks (NaN, infinite) is `null`.", "",
        "## Paths", "", "| | path | role | parameters | answer | |", "|---|---|---|---|---|---|", *rows, "",
        "| parameter | |", "|---|---|", *asks, "",
        "## Actions", "",
        'POST `{"fields": {…}, "confirm": ""}` to `/api/v1/actions/VERB`. Without `confirm` the answer is the plan, [Planned](#planned), and nothing',
        "changes. With the plan's `digest` as `confirm` it is done if it is still the same, and the answer is [ActionOutcome](#actionoutcome).", "",
        "| verb | role | fields, all of them text |", "|---|---|---|", *verbs, "",
        "`hold` releases a checkpoint that is on hold; the plan states which of both it does.", "",
        "## Audit entries", "",
        "`fields` of an [AuditRow](#auditrow) has the names from `run` on, and each argument of the action as `given.NAME`. The other names are",
        "fields of the row itself. In `relight log --audit --csv`, `fields` is one column. Values of more than 200 bytes are cut in the API; secrets are masked.", "",
        "| name | |", "|---|---|", *audited, "",
        "## Errors", "",
        'Every error has the body `{"error": {"kind", "what", "where", "hint", "details"}}`.', "",
        "| status | means |", "|---|---|", *(f"| {status} | {text} |" for status, text in api._PROBLEMS.items()), "",
        "## Bodies", "", "\n\n".join(blocks), "",
    ])  # fmt: skip


def test_the_page_equals_the_code() -> None:
    """Every path, parameter, action and field of a body; every field of an audit entry has words."""
    assert PAGE.read_text(encoding="utf-8") == written(), "python tests/house/test_http_api_page.py writes it"
    assert AUDIT_WORDS.keys() == set(AUDIT_FIELDS) and FIELDS.keys() == ACTIONS.keys()


if __name__ == "__main__":
    PAGE.write_text(written(), encoding="utf-8")
