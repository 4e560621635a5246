"""Template values of the overview: the table of runs, which values of their configurations differ, and the stores. Pure."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from relight.serve.pages_addresses import of_run, part_of, query
from relight.serve.pages_words import number, shape_of, when
from relight.serve.run_facts import differing
from relight.serve.values import RunRow, StoreRow
from relight.units import UNKNOWN, age_text, count_text, duration_text, percent_text, size_text

METRICS_MAX, CONFIG_MAX = 3, 12
"""Columns of metrics in the table of runs, and of values in the table of configurations."""
STATES = ("running", "starting", "finished", "failed", "given up", "idle")
_COLUMNS = [
    ("run", "Run", ""), ("state", "State", ""), ("", "Health", ""), ("step", "Step", "n"), ("age", "Last good checkpoint", "n"),
]  # fmt: skip
_MORE_COLUMNS = [
    ("duration", "Duration", "n"), ("host", "Host", ""), ("goodput", "Goodput", "n"), ("risk", "Risk", "n"),
    ("checkpoints", "Checkpoints", "n"), ("size", "Size", "n"), ("", "Last incident", ""),
]  # fmt: skip


def overview(
    rows: Sequence[RunRow], stores: Sequence[StoreRow], asked: Mapping[str, str], now: float
) -> dict[str, Any]:
    """Return the template values of the overview. ``asked``: what the form and the headings of the table select."""
    names = {store_row.id: store_row.name for store_row in stores}
    counted = Counter(name for row in rows for name in row.metrics)
    metrics = sorted(counted, key=lambda name: (name != "loss", -counted[name], name))[:METRICS_MAX]
    store_column = [("", "Store", "")] if len(stores) > 1 else []
    columns = [*_COLUMNS, *((f"metric:{name}", name, "n") for name in metrics), *_MORE_COLUMNS, *store_column]
    shown = [
        {
            "href": of_run(row.store, row.run),
            "value": f"{row.store}/{row.run}",
            "run": row.run,
            "state": row.state,
            "state_shape": shape_of(row.state),
            "state_why": row.state_why,
            "health": row.health,
            "why": row.why,
            "step": row.last_step,
            "age": age_text(row.age_s),
            "metrics": [compact(row.metrics.get(name)) for name in metrics],
            "duration": row.duration_s,
            "host": row.host or UNKNOWN,
            "goodput": row.goodput,
            "risk": row.risk,
            "checkpoints": row.checkpoints,
            "bytes": row.bytes,
            "incident": row.incident or "",
            "store": names.get(row.store, row.store) if store_column else "",
        }
        for row in rows
    ]
    return {
        "facts": _facts(rows, stores),
        "rows": shown,
        "columns": [_column(key, title, kind, asked) for key, title, kind in columns],
        "asked": asked,
        "states": STATES,
        "selected": any(asked[name] for name in ("find", "state")),
        "configs": _configs(rows),
        "stores": [_store_row(store_row, now) for store_row in stores],
    }


def compact(value: float | None) -> str:
    """Format a metric for a column, with four digits."""
    return UNKNOWN if value is None else f"{value:.4g}"


def _column(key: str, title: str, kind: str, asked: Mapping[str, str]) -> dict[str, str]:
    """Return a heading of the table. Its link sorts by the column; if the table is sorted by it, in the other direction."""
    current = asked["sort"]
    direction = "" if not key else {key: "ascending", f"-{key}": "descending"}.get(current, "")
    to = f"-{key}" if current == key or (kind == "n" and current != f"-{key}") else key
    return {
        "title": title,
        "kind": kind,
        "href": "/" + query(**{**asked, "sort": to}) if key else "",
        "direction": direction,
    }


def _facts(rows: Sequence[RunRow], stores: Sequence[StoreRow]) -> list[tuple[str, object, str]]:
    states, kinds = [row.state for row in rows], [row.health for row in rows]
    goodputs = [row.goodput for row in rows if row.goodput is not None]
    ages = [row.age_s for row in rows if row.age_s is not None and row.health != "idle"]
    health = ", ".join(
        f"{number(kinds.count(kind))} {kind}" for kind in ("failed", "late", "good", "idle") if kind in kinds
    )
    return [
        ("Runs", number(len(rows)), health),
        (
            "Active",
            number(states.count("running") + states.count("starting")),
            f"{number(states.count('finished'))} finished",
        ),
        ("Oldest last good", duration_text(max(ages)) if ages else UNKNOWN, "of runs that are not idle"),
        (
            "Goodput",
            percent_text(sum(goodputs) / len(goodputs)) if goodputs else UNKNOWN,
            f"mean of {count_text(len(goodputs), 'run')}" if goodputs else "no run reports it",
        ),
        (
            "Stored",
            size_text(sum(store_row.bytes or 0 for store_row in stores)),
            count_text(sum(row.checkpoints for row in rows), "checkpoint"),
        ),
    ]


def _configs(rows: Sequence[RunRow]) -> dict[str, Any]:
    """Return the table of configuration values that differ between the runs that have a configuration."""
    having = [row for row in rows if row.config]
    names = differing([row.config for row in having]) if len(having) > 1 else []
    return {
        "names": names[:CONFIG_MAX],
        "more": max(0, len(names) - CONFIG_MAX),
        "rows": [
            {
                "run": row.run,
                "href": of_run(row.store, row.run),
                "cells": [row.config.get(name, UNKNOWN) for name in names[:CONFIG_MAX]],
            }
            for row in having
        ],
        "alike": len(having) > 1 and not names,
    }


def _store_row(row: StoreRow, now: float) -> dict[str, Any]:
    fine = row.state == "ok"
    return {
        "href": part_of("storage", row.id),
        "name": row.name,
        "health": "good" if fine else "failed",
        "word": "read" if fine else "not read",
        "error": "" if fine else row.state,
        "runs": row.runs,
        "bytes": row.bytes,
        "read": when(row.read_at, now),
    }
