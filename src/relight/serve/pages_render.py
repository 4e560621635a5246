"""Rendering of templates to HTML: escapes all values, fails on missing names, and adds menu and header."""

from __future__ import annotations

import importlib.util
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relight.errors import ConfigError, extra_hint
from relight.run_names import shown
from relight.serve import pages_words as words
from relight.serve.scope import Caller
from relight.units import duration_text, percent_text, size_text
from relight.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
MENU = [
    ("Runs", "/", "viewer"),
    ("Charts", "/charts", "viewer"),
    ("Compare", "/compare", "viewer"),
    ("Lineage", "/lineage", "viewer"),
    ("Storage", "/storage", "viewer"),
    ("Incidents", "/incidents", "viewer"),
    ("Risk", "/risk", "viewer"),
    ("API", "/api", "viewer"),
    ("Audit", "/audit", "operator"),
    ("Settings", "/settings", "admin"),
]
"""Name, address and role of each menu entry. Callers with a lower role do not see it."""


@cache
def environment() -> Environment:
    """Return the template environment, created once. A missing template value is an error, not an empty text."""
    if importlib.util.find_spec("jinja2") is None:
        raise ConfigError("the pages need jinja2", hint=extra_hint("serve"))
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    templates = Environment(
        loader=FileSystemLoader(HERE / "templates"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: shown(value) if type(value) is str else value,
        auto_reload=False,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    templates.filters |= {
        "size": size_text,
        "duration": duration_text,
        "percent": percent_text,
        "number": words.number,
    }
    templates.globals |= {"version": VERSION}
    return templates


def render(template: str, here: str, **given: Any) -> str:
    """Return a page as HTML. ``here``: the address of its menu entry or tab."""
    who: Caller | None = given.get("who")
    around: dict[str, Any] = {
        "menu": [(name, address) for name, address, role in MENU if who is not None and who.may(role)],
        "here": here,
        "events": "",
        "address": "",
        "crumbs": [],
        "tabs": [],
        "notice": "",
        "notice_kind": "",
        "who": None,
        "csrf": "",
        "actions": [],
        "more": "",
        "facts": [],
        "firing": [],
    }
    return environment().get_template(template).render(around | given)
