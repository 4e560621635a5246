"""Addresses of pages. Names are quoted, so that a name with a slash stays one part of the path."""

from __future__ import annotations

from urllib.parse import quote

from relight.run_names import run_name


def at(*parts: object, **asked: object) -> str:
    """Return the address of a page from the parts of its path, each quoted, and a query."""
    return "/" + "/".join(quote(run_name(str(part)), safe="") for part in parts) + query(**asked)


def query(**asked: object) -> str:
    """Return a query string with its question mark; empty if no value is given."""
    words = "&".join(
        f"{name}={quote(run_name(str(value)), safe='')}" for name, value in asked.items() if value not in (None, "")
    )
    return "?" + words if words else ""


def of_run(store: str, run: str) -> str:
    """Return the address of a run's page."""
    return at("runs", store, run)


def of_log(store: str, run: str, **asked: object) -> str:
    """Return the address of the page of a run's log."""
    return at("runs", store, run, "log", **asked)


def of_checkpoint(store: str, run: str, which: str, **asked: object) -> str:
    """Return the address of a checkpoint's page."""
    return at("runs", store, run, "checkpoints", which, **asked)


def part_of(page: str, part: str) -> str:
    """Return the address of the section with the id ``part`` on a page."""
    return f"/{page}#{quote(part, safe='')}"


def tabs_of(store: str, run: str) -> list[tuple[str, str]]:
    """Return names and addresses of a run's tabs."""
    return [
        ("Run", of_run(store, run)),
        ("Log", of_log(store, run)),
        ("Lineage", part_of("lineage", store)),
        ("Storage", part_of("storage", store)),
    ]
