"""From values of the index to what templates are filled with: words, links, pictures. Pure. Here: the overview, and one run."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import msgspec
from markupsafe import Markup

from relight.audit.effects import ACTIONS as EFFECTS_OF_ACTIONS
from relight.audit.effects import role_of_action
from relight.serve.draw import BarPart, Curve, Mark, RankRow, TimeRange, bar, lanes, line, thinned
from relight.serve.pages_addresses import at, of_checkpoint, of_run, part_of
from relight.serve.pages_words import NOTHING, ago, number, plural, share, size, span, when
from relight.serve.values import CheckpointRow, GoodputPart, IncidentRow, RunDetail, RunRow, SaveRow, StoreRow

_POINTS_MAX = 2000
_CHARTS_MAX = 4
ACTIONS = {verb: role_of_action(verb) for verb in EFFECTS_OF_ACTIONS}
"""By its name, the role that it takes: that of its effects."""


def overview(rows: Sequence[RunRow], stores: Sequence[StoreRow], now: float) -> dict[str, Any]:
    """All runs: the worst first as the index gives them."""
    kinds = [row.health for row in rows]
    known = [row.goodput for row in rows if row.goodput is not None]
    ages = [row.age_s for row in rows if row.age_s is not None and row.health != "idle"]
    facts: list[tuple[str, object, str]] = [
        (
            "Runs",
            number(len(rows)),
            ", ".join(f"{number(kinds.count(kind))} {kind}" for kind in ("failed", "late", "good", "idle") if kind in kinds),
        ),
        ("Oldest last good", span(max(ages)) if ages else NOTHING, "of runs that are not idle"),
        (
            "Goodput",
            share(sum(known) / len(known)) if known else NOTHING,
            f"mean of {plural(len(known), 'run')}" if known else "no run has told it",
        ),
        ("Stored", size(sum(one.bytes or 0 for one in stores)), plural(sum(row.checkpoints for row in rows), "checkpoint")),
    ]
    names = {one.id: one.name for one in stores}
    shown = [
        {
            "href": of_run(row.store, row.run),
            "run": row.run,
            "health": row.health,
            "step": row.step,
            "age": ago(row.age_s),
            "goodput": row.goodput,
            "risk": row.risk,
            "checkpoints": row.checkpoints,
            "bytes": row.bytes,
            "incident": row.incident or "",
            "store": names.get(row.store, row.store),
        }
        for row in rows
    ]
    return {"facts": facts, "rows": shown, "stores": [_store_row(one, now) for one in stores]}


def _store_row(one: StoreRow, now: float) -> dict[str, Any]:
    fine = one.state == "ok"
    return {
        "href": part_of("storage", one.id),
        "name": one.name,
        "health": "good" if fine else "failed",
        "word": "read" if fine else "not read",
        "says": "" if fine else one.state,
        "runs": one.runs,
        "bytes": one.bytes,
        "read": when(one.read_at, now),
    }


def run(detail: RunDetail, checkpoints: Sequence[CheckpointRow], now: float) -> dict[str, Any]:
    """One run: its curves with marks, its last save, where its time went, its checkpoints."""
    row = detail.row
    facts = [
        ("Step", number(row.step), f"newest checkpoint {row.newest}" if row.newest else "no checkpoint"),
        ("Last good", ago(row.age_s), ""),
        ("Goodput", share(row.goodput), ""),
        ("Risk", share(row.risk), ""),
        ("Checkpoints", number(row.checkpoints), size(row.bytes)),
    ]
    picture, says, kinds = last_save(detail.saves)
    parts, spent = where_time_went(detail.goodput)
    return {
        "run": row.run,
        "health": row.health,
        "why": row.why,
        "facts": facts,
        "charts": charts(detail, checkpoints),
        "lanes": picture,
        "lanes_say": says,
        "kinds": kinds,
        "goodput": parts,
        "spent": spent,
        "rows": [checkpoint_row(row.store, row.run, one, now) for one in checkpoints],
        "incidents": [incident_row(one, now) for one in detail.incidents[:8]],
    }


def charts(detail: RunDetail, checkpoints: Sequence[CheckpointRow]) -> list[dict[str, Any]]:
    """The loss, and other metrics, each over steps; marks of checkpoints and incidents. Once as a picture, once as data for the script."""
    marks = [
        Mark(one.step, f"checkpoint of step {one.step}", "checkpoint", of_checkpoint(detail.row.store, detail.row.run, one.id))
        for one in checkpoints
    ] + [
        Mark(one.step, f"{one.kind} at step {one.step}: {one.why}", "incident", at("incidents", one.store, one.run, one.id))
        for one in detail.incidents
        if one.step is not None and one.step >= 0
    ]
    made = []
    for name in sorted(detail.series, key=lambda name: (name != "loss", name))[:_CHARTS_MAX]:
        points = list(detail.series[name])
        if not points:
            continue
        curve = Curve(name, [step for step, _ in points], [value if value is not None else math.nan for _, value in points])
        steps = curve.x
        near = [mark for mark in marks if steps[0] <= mark.x <= steps[-1] * 1.05 + 1]
        made.append(
            {
                "name": name,
                "latest": number(points[-1][1]),
                "data": chart_data(curve, near),
                "picture": line(
                    [curve], near, f"{name} over steps {number(steps[0])} to {number(steps[-1])}, with checkpoints and incidents"
                ),
            }
        )
    return made


def chart_data(curve: Curve, marks: Iterable[Mark], unit: str = "step") -> str:
    """What the script draws from: as text, which the template escapes as all other."""
    thin = thinned(curve, _POINTS_MAX)
    told = {
        "unit": unit,
        "x": list(thin.x),
        "curves": [{"name": curve.name, "y": [value if math.isfinite(value) else None for value in thin.y]}],
        "marks": [{"x": mark.x, "kind": mark.kind} for mark in marks],
    }
    return msgspec.json.encode(told).decode()


def last_save(saves: Sequence[SaveRow]) -> tuple[Markup | None, str, list[str]]:
    """The newest save that has told its phases: a lane a rank."""
    told = [one for one in saves if one.spans]
    if not told:
        return None, "No save has told its phases yet: events of the nodes that save are not seen from here.", []
    newest = max(told, key=lambda one: one.step)
    ranks = sorted({one.rank for one in newest.spans})
    rows = [
        RankRow(
            f"rank {rank}",
            [TimeRange(one.kind, one.begin_s, one.end_s, span(one.end_s - one.begin_s)) for one in newest.spans if one.rank == rank],
        )
        for rank in ranks
    ]
    kinds = list(dict.fromkeys(one.kind for one in newest.spans))
    took = f"{span(newest.seconds)} until durable, {plural(len(ranks), 'rank')}"
    says = f"Step {number(newest.step)}: {took}. Clocks of several nodes meet at the commit."
    return lanes(rows, says), says, kinds


def where_time_went(parts: Sequence[GoodputPart]) -> tuple[Markup | None, list[dict[str, Any]]]:
    """Shares of a run's time: training first, then what is lost, by cause."""
    total = sum(one.seconds for one in parts if one.seconds > 0)
    if not total:
        return None, []
    ordered = sorted((one for one in parts if one.seconds > 0), key=lambda one: (one.kind != "training" or bool(one.cause), -one.seconds))
    shares = [
        BarPart(
            f"{one.kind}, {one.cause}" if one.cause else one.kind,
            one.seconds,
            f"{span(one.seconds)}, {share(one.seconds / total)}",
            "lost" if one.cause else one.kind,
        )
        for one in ordered
    ]
    rows = [{"what": one.kind, "cause": one.cause or NOTHING, "seconds": one.seconds, "share": one.seconds / total} for one in ordered]
    return bar(shares, "Where the time went: " + ", ".join(f"{one.name} {one.says}" for one in shares[:4])), rows


def checkpoint_row(store: str, name: str, one: CheckpointRow, now: float) -> dict[str, Any]:
    """A checkpoint in a list."""
    return {
        "href": of_checkpoint(store, name, one.id),
        "id": one.id,
        "step": one.step,
        "at": when(one.at, now),
        "bytes": one.bytes,
        "seconds": one.seconds,
        "health": "good" if one.good else "failed",
        "tags": list(one.tags),
    }


def incident_row(one: IncidentRow, now: float) -> dict[str, Any]:
    """An incident in a list."""
    return {
        "href": at("incidents", one.store, one.run, one.id),
        "at": when(one.at, now),
        "run": one.run,
        "kind": one.kind,
        "step": one.step if one.step is None or one.step >= 0 else None,
        "action": one.action,
        "steps_lost": one.steps_lost,
        "seconds": one.seconds,
        "why": one.why,
    }


def action(name: str, verb: str, hidden: Sequence[tuple[str, str]], *fields: tuple[str, str, str]) -> dict[str, Any]:
    """A form that asks what an action would do. ``fields``: what it is called, its label, its value."""
    return {
        "name": name,
        "verb": verb,
        "href": f"/act/{verb}",
        "hidden": list(hidden),
        "fields": [{"name": key, "label": label, "value": value, "required": not value} for key, label, value in fields],
    }


def task(told: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Something that was begun and takes its time."""
    state = told["state"]
    says = {"running": "under way", "ok": "done", "failed": "not done"}[state]
    return {
        "name": {"save": "Save now", "drill": "Drill of a copy"}.get(told["verb"], told["verb"]),
        "health": {"running": "idle", "ok": "good", "failed": "failed"}[state],
        "word": says,
        "by": told["who"],
        "began": when(told["began"], now),
        "took": span(told["seconds"]),
        "says": told["says"],
        "details": told["details"],
        "lines": told["lines"],
    }


def actions_of_run(store: str, name: str) -> list[dict[str, Any]]:
    """What can be done with a run."""
    this = [("store", store), ("run", name)]
    return [
        action("Save now", "save", this),
        action("Prune", "prune", this, ("keep_last", "Keep the last", "5")),
        action("Drill", "drill", this),
    ]


def actions_of_checkpoint(store: str, name: str, which: str) -> list[dict[str, Any]]:
    """What can be done with a checkpoint."""
    this = [("store", store), ("run", name), ("which", which)]
    return [
        action("Tag", "tag", this, ("name", "Tag", "")),
        action("Branch", "branch", this, ("to", "New run", "")),
        action("Pin", "pin", this),
        action("Verify", "verify", this),
        action("Promote", "promote", this, ("stage", "Stage", "production")),
    ]
