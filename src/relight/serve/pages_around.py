"""Template values of the pages other than runs and checkpoints: logs, lineage, storage, incidents, risk, audit, settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.serve.draw import Curve, Fork, RankRow, TimeRange, graph, lanes, line, usage
from relight.serve.pages_addresses import of_run, part_of
from relight.serve.pages_charts import trend_data
from relight.serve.pages_views import incident_row
from relight.serve.pages_words import moment_of, number, when
from relight.serve.values import (
    AuditRow,
    FiringRow,
    IncidentRow,
    LineageRow,
    LogRow,
    RiskRow,
    SettingsDetail,
    StorageDetail,
    StoreRow,
)
from relight.units import UNKNOWN, age_text, count_text, percent_text, size_text

ROWS_MAX, TAGS_MAX = 200, 20
"""Rows of a table on one page, and tags in one row."""


def lineage(name: str, rows: Sequence[LineageRow], store: str) -> dict[str, Any]:
    """Return the template values of one store's lineage."""
    forks = [
        Fork(
            row.run,
            sorted(row.steps),
            [(step, tag) for step, tag in row.tags],
            row.parent or "",
            row.at_step,
            of_run(store, row.run),
        )
        for row in rows
    ]
    return {
        "name": name,
        "id": store,
        "picture": graph(forks, f"{count_text(len(forks), 'run')} and where each began") if forks else None,
        "rows": [
            {
                "href": of_run(store, row.run),
                "run": row.run,
                "began": f"{row.parent}, step {number(row.at_step)}" if row.parent else "none: a new run",
                "count": len(row.steps),
                "newest": max(row.steps, default=None),
                "tags": [tag for _, tag in row.tags[-TAGS_MAX:]],
            }
            for row in rows[:ROWS_MAX]
        ],
        "cut": f"The first {ROWS_MAX} of {count_text(len(rows), 'run')}; the API has all of them."
        if len(rows) > ROWS_MAX
        else "",
    }


def storage(store_row: StoreRow, detail: StorageDetail, now: float) -> dict[str, Any]:
    """Return the template values of one store: tiers, growth, and which retired checkpoints can be undeleted."""
    trend = [(moment, stored) for moment, stored in detail.trend]
    newest = trend[-1][0] if trend else 0.0
    long = newest - trend[0][0] if trend else 0.0
    unit, seconds = next(
        ((name, count) for name, count in (("days", 86400), ("hours", 3600)) if long > 2 * count), ("minutes", 60)
    )
    curve = Curve("bytes", [(moment - newest) / seconds for moment, _ in trend], [float(stored) for _, stored in trend])
    freed = sum(row.bytes or 0 for row in detail.retention)
    full = detail.full_at
    forecast = (
        f"Full {age_text(now - full)} at the rate of the last week."
        if full
        else "No forecast: the store has no limit, or does not grow."
    )
    return {
        "id": store_row.id,
        "name": store_row.name,
        "actions": [],
        "facts": [
            ("Stored", size_text(store_row.bytes), count_text(store_row.runs, "run")),
            (
                "Full",
                age_text(now - full) if full else UNKNOWN,
                "at the rate of the last week" if full else "no forecast",
            ),
            (
                "Retired, can be undeleted",
                size_text(freed) if detail.retention else UNKNOWN,
                count_text(len(detail.retention), "checkpoint") if detail.retention else "",
            ),
        ],
        "tiers": [
            {
                "name": tier.name,
                "used": tier.used,
                "limit": tier.limit,
                "free": tier.free,
                "picture": usage(tier.used or 0, tier.limit, f"{size_text(tier.used)} of {size_text(tier.limit)}"),
            }
            for tier in detail.tiers
        ],
        "trend": line([curve], [], f"bytes of {store_row.name} over {unit}") if len(trend) > 1 else None,
        "trend_data": trend_data(curve, unit),
        "forecast": f"{unit.capitalize()} before the newest save; bytes. {forecast}",
        "retention": [
            {"run": row.run, "id": row.id, "step": row.step, "what": row.what, "why": row.why, "bytes": row.bytes}
            for row in detail.retention[:ROWS_MAX]
        ],
        "retention_note": "None: only rules with an undo window keep the bytes, such as keep=relight.keep(last=3, undo_window='12h').",
    }


def incidents(rows: Sequence[IncidentRow], now: float) -> dict[str, Any]:
    """Return the template values of incidents: a timeline with one row for each run, and a table."""
    lanes_of: dict[str, list[TimeRange]] = {}
    times = [(row, moment) for row in rows if (moment := seconds_of(row.at)) is not None]
    first = min((moment for _, moment in times), default=0.0)
    for row, moment in times:
        hours = (moment - first) / 3600
        lanes_of.setdefault(row.run, []).append(
            TimeRange("failure", hours, hours + max((row.seconds or 0) / 3600, 0.0), f"{row.kind}: {row.why}")
        )
    caption = f"{count_text(len(rows), 'incident')}, hours since the first"
    return {
        "incidents": [incident_row(row, now) for row in rows],
        "caption": caption,
        "picture": lanes([RankRow(name, spans) for name, spans in lanes_of.items()], caption, unit="h")
        if lanes_of
        else None,
    }


def seconds_of(moment: float | str | None) -> float | None:
    """Return a time as seconds since 1970; None if it is invalid."""
    parsed = moment_of(moment)
    return None if parsed is None else parsed.timestamp()


def firing(rows: Sequence[FiringRow], now: float) -> list[dict[str, Any]]:
    """Return the entries of the banner about alerts that fire."""
    return [
        {
            "kind": row.kind.replace("_", " "),
            "severity": row.severity,
            "name": row.run or row.store,
            "href": of_run(row.store, row.run) if row.run else part_of("storage", row.store),
            "why": row.why,
            "since": when(row.since, now),
            "hint": row.hint,
        }
        for row in rows
    ]


def risk(rows: Sequence[RiskRow], now: float) -> list[dict[str, Any]]:
    """Return table rows of machines that are likely to fail."""
    return [
        {
            "href": of_run(row.store, row.run),
            "run": row.run,
            "node": row.node,
            "at": when(row.at, now),
            "by": row.detector,
            "risk": row.risk,
            "why": row.why,
            "picture": usage(row.risk or 0.0, 1.0, f"risk {percent_text(row.risk)}"),
        }
        for row in rows
    ]


def log(rows: Sequence[LogRow], now: float) -> list[dict[str, Any]]:
    """Return table rows of a run's log."""
    return [
        {
            "number": row.seq,
            "at": when(row.written, now),
            "kind": row.kind.lower(),
            "what": row.what,
            "fault": row.fault,
            "health": "failed" if row.kind == "damaged" else "late",
        }
        for row in rows
    ]


def audit(rows: Sequence[AuditRow], now: float) -> list[dict[str, Any]]:
    """Return table rows of audit entries."""
    health = {"ok": "good", "done": "good", "refused": "failed", "failed": "failed", "": "idle"}
    return [
        {
            "number": entry.seq,
            "at": when(entry.at, now),
            "who": entry.who,
            "what": entry.what,
            "on": entry.on,
            "fields": "; ".join(f"{name}={value}" for name, value in entry.fields.items() if value),
            "how": entry.how or "begun",
            "health": health.get(entry.how or "", "other"),
        }
        for entry in rows
    ]


def settings(detail: SettingsDetail, now: float) -> dict[str, Any]:
    """Return table rows of tokens without their secrets, alert rules, and retention rules."""
    state = {"valid": "good", "expired": "idle", "revoked": "failed"}
    return {
        "tokens": [
            {
                "id": token.id,
                "name": token.name,
                "role": token.role,
                "scope": token.scope or "everything",
                "made": when(token.made_at, now),
                "ends": when(token.ends_at, now) if token.ends_at else "never",
                "health": state.get(token.state, "other"),
                "state": token.state,
            }
            for token in detail.tokens
        ],
        "alerts": [
            {
                "name": rule.name,
                "condition": rule.says,
                "severity": rule.severity,
                "health": "failed" if rule.firing else "good",
                "state": "firing" if rule.firing else "quiet",
            }
            for rule in detail.alerts
        ],
        "policies": [(str(name), str(rules)) for name, rules in detail.policies],
    }
