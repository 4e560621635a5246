"""Template values made from values of the index: words, links, pictures. Pure. This module: a run's page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from markupsafe import Markup

from relight.audit.effects import ACTIONS as EFFECTS_OF_ACTIONS
from relight.audit.effects import role_of_action
from relight.serve.draw import BarPart, Mark, RankRow, TimeRange, bar, lanes
from relight.serve.pages_addresses import at, of_checkpoint
from relight.serve.pages_words import number, shape_of, when
from relight.serve.values import CheckpointDetail, CheckpointRow, GoodputPart, IncidentRow, RunDetail, RunRow, SaveRow
from relight.units import UNKNOWN, age_text, count_text, duration_text, percent_text, size_text

ACTIONS = {verb: role_of_action(verb) for verb in EFFECTS_OF_ACTIONS}
"""The role that each action needs, computed from its effects."""


def run(detail: RunDetail, checkpoints: Sequence[CheckpointRow], now: float) -> dict[str, Any]:
    """Return the template values of a run: its last save, goodput, checkpoints."""
    row = detail.row
    facts = [
        ("Job", Markup('<span class="is {}">{}</span>').format(shape_of(row.state), row.state), row.state_why),
        ("Step", number(row.last_step), f"newest checkpoint: {number(row.step)}" if row.newest else "no checkpoint"),
        ("Last good", age_text(row.age_s), ""),
        ("Duration", duration_text(row.duration_s), f"on {row.host}" if row.host else ""),
        ("Goodput", percent_text(row.goodput), ""),
        ("Risk", percent_text(row.risk), ""),
        ("Checkpoints", number(row.checkpoints), size_text(row.bytes)),
    ]
    picture, caption, kinds = last_save(detail.saves)
    parts, spent = where_time_went(detail.goodput)
    return {
        "run": row.run,
        "health": row.health,
        "why": row.why,
        "facts": facts,
        "config": sorted(row.config.items()),
        "newest_metrics": [(name, number(value)) for name, value in row.metrics.items()],
        "lanes": picture,
        "lanes_caption": caption,
        "kinds": kinds,
        "goodput": parts,
        "spent": spent,
        "rows": [checkpoint_row(row.store, row.run, checkpoint, now) for checkpoint in checkpoints],
        "incidents": [incident_row(incident, now) for incident in detail.incidents[:8]],
        "followers": [
            {
                **vars(row),
                "time": when(row.time, now),
                "steps_late": None if row.step is None else max(0, (detail.row.step or 0) - row.step),
            }
            for row in detail.followers
        ],
    }


def marks_of(detail: RunDetail, checkpoints: Sequence[CheckpointRow]) -> list[Mark]:
    """Return marks for charts: the run's checkpoints and incidents, at their steps."""
    return [
        Mark(
            checkpoint.step,
            f"{'damaged ' if checkpoint.state == 'damaged' else ''}checkpoint of step {checkpoint.step}",
            "damaged" if checkpoint.state == "damaged" else "checkpoint",
            of_checkpoint(detail.row.store, detail.row.run, checkpoint.id),
        )
        for checkpoint in checkpoints
    ] + [
        Mark(
            incident.step,
            f"{incident.kind} at step {incident.step}: {incident.why}",
            "incident",
            at("incidents", incident.store, incident.run, incident.id),
        )
        for incident in detail.incidents
        if incident.step is not None and incident.step >= 0
    ]


def last_save(saves: Sequence[SaveRow]) -> tuple[Markup | None, str, list[str]]:
    """Return picture, caption and phases of the newest save with known events, with one row for each rank."""
    saves_with_spans = [save for save in saves if save.spans]
    if not saves_with_spans:
        return None, "Phases of saves are unknown: this machine has no events of the nodes that save.", []
    newest = max(saves_with_spans, key=lambda save: save.step)
    ranks = sorted({phase.rank for phase in newest.spans})
    rows = [
        RankRow(
            f"rank {rank}",
            [
                TimeRange(phase.kind, phase.begin_s, phase.end_s, duration_text(phase.end_s - phase.begin_s))
                for phase in newest.spans
                if phase.rank == rank
            ],
        )
        for rank in ranks
    ]
    kinds = list(dict.fromkeys(phase.kind for phase in newest.spans))
    duration = f"{duration_text(newest.seconds)} until durable, {count_text(len(ranks), 'rank')}"
    caption = f"Step {number(newest.step)}: {duration}. Clocks of several nodes are aligned at the commit."
    return lanes(rows, caption), caption, kinds


def where_time_went(parts: Sequence[GoodputPart]) -> tuple[Markup | None, list[dict[str, Any]]]:
    """Return picture and table rows of a run's time: training first, then time lost, by cause."""
    total = sum(part.seconds for part in parts if part.seconds > 0)
    if not total:
        return None, []
    ordered = sorted(
        (part for part in parts if part.seconds > 0),
        key=lambda part: (part.kind != "training" or bool(part.cause), -part.seconds),
    )
    shares = [
        BarPart(
            f"{part.kind}, {part.cause}" if part.cause else part.kind,
            part.seconds,
            f"{duration_text(part.seconds)}, {percent_text(part.seconds / total)}",
            "lost" if part.cause else part.kind,
        )
        for part in ordered
    ]
    rows = [
        {
            "what": part.kind,
            "cause": part.cause or UNKNOWN,
            "seconds": part.seconds,
            "share": part.seconds / total,
        }
        for part in ordered
    ]
    return bar(
        shares, "Where the time went: " + ", ".join(f"{bar_part.name} {bar_part.tooltip}" for bar_part in shares[:4])
    ), rows


def checkpoint_row(store: str, name: str, row: CheckpointRow, now: float) -> dict[str, Any]:
    """Return a table row of a checkpoint."""
    return {
        "href": of_checkpoint(store, name, row.id),
        "id": row.id,
        "step": row.step,
        "at": when(row.at, now),
        "bytes": row.bytes,
        "seconds": row.seconds,
        "health": shape_of(row.state),
        "state": row.state,
        "why": row.why.removeprefix(f"{row.state}: "),
        "tags": list(row.tags),
    }


def incident_row(row: IncidentRow, now: float) -> dict[str, Any]:
    """Return a table row of an incident."""
    return {
        "href": at("incidents", row.store, row.run, row.id),
        "at": when(row.at, now),
        "run": row.run,
        "kind": row.kind,
        "step": row.step if row.step is None or row.step >= 0 else None,
        "action": row.action,
        "steps_lost": row.steps_lost,
        "seconds": row.seconds,
        "why": row.why,
    }


def action(name: str, verb: str, hidden: Sequence[tuple[str, str]], *fields: tuple[str, str, str]) -> dict[str, Any]:
    """Return the form that plans an action. ``fields``: name, label and value of each input."""
    return {
        "name": name,
        "verb": verb,
        "href": f"/act/{verb}",
        "hidden": list(hidden),
        "fields": [
            {"name": key, "label": label, "value": value, "required": not value} for key, label, value in fields
        ],
    }


def task(facts: Mapping[str, Any], now: float) -> dict[str, Any]:
    """Return the template values of a task."""
    state = facts["state"]
    word = {"running": "running", "ok": "done", "failed": "failed"}[state]
    return {
        "name": {"save": "Save now", "drill": "Drill of a copy"}.get(facts["verb"], facts["verb"]),
        "health": {"running": "idle", "ok": "good", "failed": "failed"}[state],
        "word": word,
        "by": facts["who"],
        "began": when(facts["began"], now),
        "took": duration_text(facts["seconds"]),
        "message": facts["says"],
        "details": facts["details"],
        "lines": facts["lines"],
    }


def actions_of_run(store: str, row: RunRow) -> list[dict[str, Any]]:
    """Return the forms of a run's actions, those that its state allows: only an active job can save."""
    target = [("store", store), ("run", row.run)]
    forms = []
    if row.state in ("running", "starting"):
        forms.append(action("Save now", "save", target))
    if row.checkpoints > 1:
        forms.append(action("Prune", "prune", target, ("keep_last", "Keep the last", "5")))
    if row.checkpoints:
        forms.append(action("Drill", "drill", target))
    return forms


def actions_of_checkpoint(store: str, name: str, detail: CheckpointDetail) -> list[dict[str, Any]]:
    """Return the forms of a checkpoint's actions. A damaged checkpoint can only be verified again, held and released."""
    target = [("store", store), ("run", name), ("which", detail.row.id)]
    hold = action("Release" if detail.hold else "Hold", "hold", target)
    if detail.row.state == "damaged":
        return [action("Verify", "verify", target), hold]
    return [
        action("Tag", "tag", target, ("name", "Tag", "")),
        action("Branch", "branch", target, ("to", "New run", "")),
        hold,
        action("Verify", "verify", target),
        action("Promote", "promote", target, ("stage", "Stage", "production")),
    ]
