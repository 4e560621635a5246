"""What is around runs, for templates: lineage, storage, incidents, risk, audit, settings. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from relight.serve.draw import Curve, Fork, RankRow, TimeRange, graph, lanes, line, usage
from relight.serve.pages_addresses import of_run
from relight.serve.pages_views import chart_data, incident_row
from relight.serve.pages_words import NOTHING, ago, moment_of, number, plural, share, size, span, when
from relight.serve.values import (
    AuditRow,
    IncidentRow,
    LineageRow,
    RiskRow,
    SettingsDetail,
    StorageDetail,
    StoreRow,
)

ROWS_MAX, TAGS_MAX = 200, 20
"""Rows of a table on one page, and tags in one row."""


def lineage(name: str, rows: Sequence[LineageRow], store: str) -> dict[str, Any]:
    """The runs of one store: each a line."""
    forks = [
        Fork(one.run, sorted(one.steps), [(step, tag) for step, tag in one.tags], one.parent or "", one.at_step, of_run(store, one.run))
        for one in rows
    ]
    return {
        "name": name,
        "id": store,
        "picture": graph(forks, f"{plural(len(forks), 'run')} and where each began") if forks else None,
        "rows": [
            {
                "href": of_run(store, one.run),
                "run": one.run,
                "began": f"{one.parent}, step {number(one.at_step)}" if one.parent else "a run of its own",
                "count": len(one.steps),
                "newest": max(one.steps, default=None),
                "tags": [tag for _, tag in one.tags[-TAGS_MAX:]],
            }
            for one in rows[:ROWS_MAX]
        ],
        "cut": f"The first {ROWS_MAX} of {plural(len(rows), 'run')}; the API has all of them." if len(rows) > ROWS_MAX else "",
    }


def storage(one: StoreRow, detail: StorageDetail, now: float) -> dict[str, Any]:
    """One store: its tiers, how it grew, what goes next."""
    trend = [(moment, held) for moment, held in detail.trend]
    newest = trend[-1][0] if trend else 0.0
    long = newest - trend[0][0] if trend else 0.0
    unit, seconds = next(((name, count) for name, count in (("days", 86400), ("hours", 3600)) if long > 2 * count), ("minutes", 60))
    curve = Curve("bytes", [(moment - newest) / seconds for moment, _ in trend], [float(held) for _, held in trend])
    freed = sum(row.bytes or 0 for row in detail.retention)
    full = detail.full_at
    said = (
        f"Full {ago(now - full)}, if it goes on like this."
        if full
        else "Whether it fills up cannot be said: it has no limit, or does not grow."
    )
    return {
        "id": one.id,
        "name": one.name,
        "actions": [],
        "facts": [
            ("Stored", size(one.bytes), plural(one.runs, "run")),
            ("Full", ago(now - full) if full else NOTHING, "at the present pace" if full else "not in sight"),
            (
                "Retention takes next",
                size(freed) if detail.retention else NOTHING,
                plural(len(detail.retention), "checkpoint") if detail.retention else "",
            ),
        ],
        "tiers": [
            {
                "name": tier.name,
                "used": tier.used,
                "limit": tier.limit,
                "free": tier.free,
                "picture": usage(tier.used or 0, tier.limit, f"{size(tier.used)} of {size(tier.limit)}"),
            }
            for tier in detail.tiers
        ],
        "trend": line([curve], [], f"bytes of {one.name} over {unit}") if len(trend) > 1 else None,
        "trend_data": chart_data(curve, [], unit),
        "forecast": f"{unit.capitalize()} before the newest save; bytes. {said}",
        "retention": [
            {"run": row.run, "id": row.id, "step": row.step, "what": row.what, "why": row.why, "bytes": row.bytes}
            for row in detail.retention[:ROWS_MAX]
        ],
        "retention_says": "Nothing: no run here has a rule by which a checkpoint would go (keep=relight.keep(…)), or all such have gone.",
    }


def incidents(rows: Sequence[IncidentRow], now: float) -> dict[str, Any]:
    """Which runs failed when, a lane a run, and each in words."""
    lanes_of: dict[str, list[TimeRange]] = {}
    times = [(one, moment) for one in rows if (moment := seconds_of(one.at)) is not None]
    first = min((moment for _, moment in times), default=0.0)
    for one, moment in times:
        hours = (moment - first) / 3600
        lanes_of.setdefault(one.run, []).append(
            TimeRange("failure", hours, hours + max((one.seconds or 0) / 3600, 0.0), f"{one.kind}: {one.why}")
        )
    says = f"{plural(len(rows), 'incident')}, hours since the first"
    return {
        "incidents": [incident_row(one, now) for one in rows],
        "says": says,
        "picture": lanes([RankRow(name, spans) for name, spans in lanes_of.items()], says, unit="h") if lanes_of else None,
    }


def seconds_of(moment: float | str | None) -> float | None:
    """A time as seconds since 1970."""
    found = moment_of(moment)
    return None if found is None else found.timestamp()


def incident(one: IncidentRow, now: float) -> dict[str, Any]:
    """One incident, whole."""
    return {
        "kind": one.kind,
        "why": one.why,
        "action": one.action,
        "reason": one.reason,
        "facts": [
            ("When", when(one.at, now), ""),
            ("Step", number(one.step), ""),
            ("Rank", number(one.rank), ""),
            ("Steps lost", number(one.steps_lost), ""),
            ("Until training again", span(one.seconds), ""),
        ],
        "workers": "\n".join(str(worker) for worker in one.workers),
        "clues": [[str(cell) for cell in (clue if isinstance(clue, list | tuple) else [clue])] for clue in one.clues],
        "words": one.words,
        "stacks": list(one.stacks.items()),
    }


def risk(rows: Sequence[RiskRow], now: float) -> list[dict[str, Any]]:
    """Machines that look like failing."""
    return [
        {
            "href": of_run(one.store, one.run),
            "run": one.run,
            "node": one.node,
            "at": when(one.at, now),
            "by": one.detector,
            "risk": one.risk,
            "why": one.why,
            "picture": usage(one.risk or 0.0, 1.0, f"risk {share(one.risk)}"),
        }
        for one in rows
    ]


def audit(rows: Sequence[AuditRow], now: float) -> list[dict[str, Any]]:
    """Who did what."""
    health = {"ok": "good", "done": "good", "refused": "failed", "failed": "failed", "": "idle"}
    return [
        {
            "number": one.seq,
            "at": when(one.at, now),
            "who": one.who,
            "what": one.what,
            "on": one.on,
            "fields": "; ".join(f"{name}={value}" for name, value in one.fields.items() if value),
            "how": one.how or "begun",
            "health": health.get(one.how or "", "other"),
        }
        for one in rows
    ]


def settings(told: SettingsDetail, now: float) -> dict[str, Any]:
    """Tokens without their secrets, alert rules, what runs keep."""
    state = {"valid": "good", "expired": "idle", "revoked": "failed"}
    return {
        "tokens": [
            {
                "id": one.id,
                "name": one.name,
                "role": one.role,
                "scope": one.scope or "everything",
                "made": when(one.made_at, now),
                "ends": when(one.ends_at, now) if one.ends_at else "never",
                "health": state.get(one.state, "other"),
                "state": one.state,
            }
            for one in told.tokens
        ],
        "alerts": [
            {
                "name": one.name,
                "says": one.says,
                "severity": one.severity,
                "health": "failed" if one.firing else "good",
                "state": "firing" if one.firing else "quiet",
            }
            for one in told.alerts
        ],
        "policies": [(str(name), str(says)) for name, says in told.policies],
    }
