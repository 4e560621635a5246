"""Addresses of pages: every name quoted, so that it stays one part of the path."""

from __future__ import annotations

from urllib.parse import quote

from relight.run_names import run_name


def at(*parts: object, **asked: object) -> str:
    """An address of a page: every part quoted, so that a name stays one part."""
    return "/" + "/".join(quote(run_name(str(one)), safe="") for one in parts) + query(**asked)


def query(**asked: object) -> str:
    """What is asked of an address, with its question mark; nothing if nothing is."""
    words = "&".join(f"{name}={quote(run_name(str(value)), safe='')}" for name, value in asked.items() if value not in (None, ""))
    return "?" + words if words else ""


def of_run(store: str, run: str) -> str:
    """A run's page."""
    return at("runs", store, run)


def of_checkpoint(store: str, run: str, which: str, **asked: object) -> str:
    """A checkpoint's page."""
    return at("runs", store, run, "checkpoints", which, **asked)


def part_of(page: str, part: str) -> str:
    """A place on a page, which has its name as id."""
    return f"/{page}#{quote(part, safe='')}"


def tabs_of(store: str, run: str) -> list[tuple[str, str]]:
    """What there is of one run."""
    return [("Run", of_run(store, run)), ("Lineage", part_of("lineage", store)), ("Storage", part_of("storage", store))]
