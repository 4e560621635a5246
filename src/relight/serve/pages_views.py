"""From values of the index to what templates are filled with: words, links, pictures. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from urllib.parse import quote

import msgspec
from markupsafe import Markup

from relight.serve.draw import Curve, Fork, Lane, Mark, Piece, Share, Span, Tile, bar, graph, histogram, lanes, line, strip, treemap, usage
from relight.serve.pages_words import NOTHING, ago, moment_of, number, plural, share, size, span, when
from relight.versions.difference import layer_of

TENSORS_MAX = 200
_POINTS_MAX = 2000
_CHARTS_MAX = 4
_WORTH_A_ROW = ("changed", "other shape", "only in a", "only in b")
_KIND_OF = {"only in a": "removed", "only in b": "added", "other shape": "changed"}


def at(*parts: object, **asked: object) -> str:
    """An address of a page: every part quoted, so that a name stays one part."""
    return "/" + "/".join(quote(str(one), safe="") for one in parts) + query(**asked)


def query(**asked: object) -> str:
    """What is asked of an address, with its question mark; nothing if nothing is."""
    words = "&".join(f"{name}={quote(str(value), safe='')}" for name, value in asked.items() if value not in (None, ""))
    return "?" + words if words else ""


def of_run(store: str, run: str) -> str:
    """A run's page."""
    return at("runs", store, run)


def of_checkpoint(store: str, run: str, which: str, **asked: object) -> str:
    """A checkpoint's page."""
    return at("runs", store, run, "checkpoints", which, **asked)


def tabs_of(store: str, run: str) -> list[tuple[str, str]]:
    """What there is of one run."""
    return [("Run", of_run(store, run)), ("Lineage", "/lineage#" + quote(store, safe="")), ("Storage", "/storage#" + quote(store, safe=""))]


def overview(rows: Sequence[Any], stores: Sequence[Any], now: float) -> dict[str, Any]:
    """All runs: the worst first as the index gives them."""
    kinds = [row.health for row in rows]
    known = [row.goodput for row in rows if row.goodput is not None]
    ages = [row.age_s for row in rows if row.age_s is not None and row.health != "idle"]
    facts: list[tuple[str, object, str]] = [
        ("Runs", number(len(rows)), ", ".join(f"{number(kinds.count(kind))} {kind}" for kind in ("failed", "late", "good", "idle") if kind in kinds)),
        ("Oldest last good", span(max(ages)) if ages else NOTHING, "of runs that are not idle"),
        ("Goodput", share(sum(known) / len(known)) if known else NOTHING, f"mean of {plural(len(known), 'run')}" if known else "no run has told it"),
        ("Stored", size(sum(one.bytes or 0 for one in stores)), plural(sum(row.checkpoints for row in rows), "checkpoint")),
    ]
    names = {one.id: one.name for one in stores}
    shown = [
        {
            "href": of_run(row.store, row.run), "run": row.run, "health": row.health, "step": row.step, "age": ago(row.age_s), "goodput": row.goodput,
            "risk": row.risk, "checkpoints": row.checkpoints, "bytes": row.bytes, "incident": row.incident or "", "store": names.get(row.store, row.store),
        }
        for row in rows
    ]  # fmt: skip
    return {"facts": facts, "rows": shown, "stores": [_store_row(one, now) for one in stores]}


def _store_row(one: Any, now: float) -> dict[str, Any]:
    fine = one.state == "ok"
    return {
        "href": at("storage") + f"#{quote(one.id, safe='')}", "name": one.name, "health": "good" if fine else "failed", "says": "" if fine else one.state,
        "runs": one.runs, "bytes": one.bytes, "read": when(one.read_at, now),
    }  # fmt: skip


def run(detail: Any, checkpoints: Sequence[Any], now: float) -> dict[str, Any]:
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
        "run": row.run, "health": row.health, "why": getattr(row, "why", ""), "facts": facts, "charts": charts(detail, checkpoints),
        "lanes": picture, "lanes_say": says, "kinds": kinds, "goodput": parts, "spent": spent,
        "rows": [checkpoint_row(row.store, row.run, one, now) for one in checkpoints],
        "incidents": [incident_row(one, now) for one in detail.incidents[:8]],
    }  # fmt: skip


def charts(detail: Any, checkpoints: Sequence[Any]) -> list[dict[str, Any]]:
    """The loss, and other metrics, each over steps; marks of checkpoints and incidents. Once as a picture, once as data for the script."""
    marks = [
        Mark(one.step, f"checkpoint of step {one.step}", "checkpoint", of_checkpoint(detail.row.store, detail.row.run, one.id)) for one in checkpoints
    ] + [
        Mark(one.step, f"{one.kind} at step {one.step}: {one.why}", "incident", at("incidents", one.store, one.run, one.id))
        for one in detail.incidents if one.step is not None and one.step >= 0
    ]  # fmt: skip
    made = []
    for name in sorted(detail.series, key=lambda name: (name != "loss", name))[:_CHARTS_MAX]:
        points = list(detail.series[name])
        if not points:
            continue
        curve = Curve(name, [step for step, _ in points], [value if value is not None else math.nan for _, value in points])
        steps = curve.x
        near = [mark for mark in marks if steps[0] <= mark.x <= steps[-1] * 1.05 + 1]
        made.append({
            "name": name, "latest": number(points[-1][1]), "data": chart_data(curve, near),
            "picture": line([curve], near, f"{name} over steps {number(steps[0])} to {number(steps[-1])}, with checkpoints and incidents"),
        })  # fmt: skip
    return made


def chart_data(curve: Curve, marks: Iterable[Mark], unit: str = "step") -> str:
    """What the script draws from: as text, which the template escapes as all other."""
    every = max(1, math.ceil(len(curve.x) / _POINTS_MAX))
    ys = [value if math.isfinite(value) else None for value in curve.y[::every]]
    told = {"unit": unit, "x": list(curve.x[::every]), "curves": [{"name": curve.name, "y": ys}], "marks": [{"x": mark.x, "kind": mark.kind} for mark in marks]}
    return msgspec.json.encode(told).decode()


def last_save(saves: Sequence[Any]) -> tuple[Markup | None, str, list[str]]:
    """The newest save that has told its phases: a lane a rank."""
    told = [one for one in saves if one.spans]
    if not told:
        return None, "No save has told its phases yet: events of the nodes that save are not seen from here.", []
    newest = max(told, key=lambda one: (one.at or 0) if not isinstance(one.at, str) else 0)
    ranks = sorted({one.rank for one in newest.spans})
    rows = [
        Lane(f"rank {rank}", [Span(one.kind, one.begin_s, one.end_s, span(one.end_s - one.begin_s)) for one in newest.spans if one.rank == rank]) for rank in ranks
    ]
    kinds = list(dict.fromkeys(one.kind for one in newest.spans))
    says = f"Step {number(newest.step)}: {span(newest.seconds)} until durable, {plural(len(ranks), 'rank')}. Clocks of several nodes meet at the commit."
    return lanes(rows, says), says, kinds


def where_time_went(parts: Sequence[Any]) -> tuple[Markup | None, list[dict[str, Any]]]:
    """Shares of a run's time: training first, then what is lost, by cause."""
    total = sum(one.seconds for one in parts if one.seconds > 0)
    if not total:
        return None, []
    ordered = sorted((one for one in parts if one.seconds > 0), key=lambda one: (one.kind != "training" or bool(one.cause), -one.seconds))
    shares = [
        Share(f"{one.kind}, {one.cause}" if one.cause else one.kind, one.seconds, f"{span(one.seconds)}, {share(one.seconds / total)}", "lost" if one.cause else one.kind)
        for one in ordered
    ]
    rows = [{"what": one.kind, "cause": one.cause or NOTHING, "seconds": one.seconds, "share": one.seconds / total} for one in ordered]
    return bar(shares, "Where the time went: " + ", ".join(f"{one.name} {one.says}" for one in shares[:4])), rows


def checkpoint_row(store: str, name: str, one: Any, now: float) -> dict[str, Any]:
    """A checkpoint in a list."""
    return {
        "href": of_checkpoint(store, name, one.id), "id": one.id, "step": one.step, "at": when(one.at, now), "bytes": one.bytes,
        "seconds": getattr(one, "seconds", None), "health": "good" if one.good else "failed", "tags": list(one.tags),
    }  # fmt: skip


def checkpoint(store: str, name: str, detail: Any, find: str, now: float) -> dict[str, Any]:
    """One checkpoint: its tensors as areas and as rows, where it lies, what else is said of it."""
    row = detail.row
    wanted = [one for one in detail.tensors if find in one.path] if find else list(detail.tensors)
    wanted.sort(key=lambda one: (-one.bytes, one.path))
    groups: dict[str, int] = {}
    for one in detail.tensors:
        groups.setdefault(group_of(one.path), len(groups))
    tiles = [
        Tile(one.path, one.bytes, f"{size(one.bytes)}, {one.dtype} {shape(one.shape)}", of_checkpoint(store, name, row.id, tensor=one.path) + "#tensor",
             one.path[len(group_of(one.path)) + 1 :], groups[group_of(one.path)])
        for one in detail.tensors
    ]
    total = sum(one.bytes for one in detail.tensors)
    says = f"{plural(len(detail.tensors), 'tensor')}, {size(total)}; a colour a part: {', '.join(list(groups)[:8])}."
    return {
        "run": name, "step": row.step, "health": "good" if row.good else "failed", "why": getattr(row, "why", "") or "", "tags": list(row.tags),
        "facts": [("Saved", when(row.at, now), row.id), ("Stored", size(row.bytes), f"of {size(total)} of tensors"), ("Tensors", number(len(detail.tensors)), ""),
                  ("Verified", when(detail.verified_at, now) if detail.verified_at else "not yet", "every byte, by hash")],
        "treemap": treemap(tiles, says) if tiles else None, "treemap_says": says, "find": find,
        "tensors": [
            {"path": one.path, "shape": shape(one.shape), "dtype": one.dtype, "bytes": one.bytes, "codec": one.codec or "as it is", "ratio": one.ratio,
             "href": of_checkpoint(store, name, row.id, tensor=one.path) + "#tensor"}
            for one in wanted[:TENSORS_MAX]
        ],
        "cut": f"The largest {TENSORS_MAX} of {number(len(wanted))}; find the others by a part of their path." if len(wanted) > TENSORS_MAX else "",
        "residency": [{"name": one.name, "health": "good" if one.there else "idle", "bytes": one.bytes} for one in detail.residency],
        "values": [(str(key), str(value)) for key, value in detail.facts],
    }  # fmt: skip


def one_tensor(detail: Any, path: str) -> dict[str, Any] | None:
    """One tensor of a checkpoint: what is known of its values."""
    found = next((one for one in detail.tensors if one.path == path), None)
    if found is None:
        return None
    told = getattr(found, "statistics", None)
    facts = [("Shape", shape(found.shape), found.dtype), ("Size", size(found.bytes), found.codec or "as it is"), ("Stored", share(found.ratio), "of its size")]
    if told is None:
        return {"path": found.path, "facts": facts, "histogram": None, "says": "Its values have not been read. At a terminal: relight show RUN@WHICH --stats"}
    facts += [(name, number(value), "") for name, value in told.numbers]
    picture = histogram(told.edges, told.counts, f"values of {found.path}") if told.counts else None
    return {"path": found.path, "facts": facts, "histogram": picture, "says": told.says}


def group_of(path: str) -> str:
    """Which part of the state a tensor is of: the first part of its path."""
    return path.replace("/", ".").partition(".")[0]


def shape(of: Sequence[int]) -> str:
    """2 × 3; a scalar is a dot."""
    return " × ".join(str(one) for one in of) or "·"


def compare(found: Any) -> dict[str, Any]:
    """What differs between two: a cell a tensor, a row a layer; the tensors that differ; other values."""
    apart = [one for one in found.tensors if one.kind != "same"]
    pieces = [Piece(layer_of(one.name), one.name, one.share or 0.0, said_of(one), one.kind) for one in found.tensors]
    count = {kind: sum(one.kind == kind for one in found.tensors) for kind in ("same", "changed", "added", "removed")}
    return {
        "found": True,
        "facts": [("The same", number(count["same"]), "to the bit"), ("Changed", number(count["changed"]), ""), ("Only in that", number(count["added"]), ""),
                  ("Only in this", number(count["removed"]), ""), ("Other values", number(len(found.values)), "")],
        "picture": strip(pieces, f"{plural(len(apart), 'tensor')} of {number(len(found.tensors))} differ") if apart else None,
        "tensors": [{"name": one.name, "kind": one.kind, "share": one.share, "largest": one.largest}
                    for one in sorted(apart, key=lambda one: (-(one.share or 0.0), one.name))[:TENSORS_MAX]],
        "cut": f"The {TENSORS_MAX} that differ most, of {number(len(apart))}." if len(apart) > TENSORS_MAX else "",
        "values": [(str(path), str(one), str(other)) for path, one, other in found.values],
    }  # fmt: skip


def compared(answer: Any) -> dict[str, Any]:
    """A comparison that is there, or how far it is."""
    done = getattr(answer, "done", None)
    if done is not None and answer.result is None:
        return {"found": False, "waiting": f"Tensors that differ are being read: {share(done)}. This page shows it when it is there."}
    return {"waiting": ""} | compare(getattr(answer, "result", answer))


def said_of(one: Any) -> str:
    """A difference in words."""
    if one.kind != "changed":
        return {"same": "the same", "added": "only in that", "removed": "only in this"}.get(one.kind, one.kind)
    return f"{share(one.share)} of its values, at most by {number(one.largest)}"


def lineage(name: str, rows: Sequence[Any], store: str) -> dict[str, Any]:
    """The runs of one store: each a line."""
    forks = [Fork(one.run, sorted(one.steps), [(step, tag) for step, tag in one.tags], one.parent or "", one.at_step, of_run(store, one.run)) for one in rows]
    return {
        "name": name, "id": store,
        "picture": graph(forks, f"{plural(len(forks), 'run')} and where each began") if forks else None,
        "rows": [
            {"href": of_run(store, one.run), "run": one.run, "began": f"{one.parent}, step {number(one.at_step)}" if one.parent else "a run of its own",
             "count": len(one.steps), "newest": max(one.steps, default=None), "tags": [tag for _, tag in one.tags]}
            for one in rows
        ],
    }  # fmt: skip


def storage(one: Any, detail: Any, now: float) -> dict[str, Any]:
    """One store: its tiers, how it grew, what goes next."""
    trend = [(moment, held) for moment, held in detail.trend]
    newest = trend[-1][0] if trend else 0.0
    curve = Curve("bytes", [(moment - newest) / 86400 for moment, _ in trend], [float(held) for _, held in trend])
    freed = sum(row.bytes or 0 for row in detail.retention)
    full = detail.full_at
    said = f"Full {ago(now - full)}, if it goes on like this." if full else "Whether it fills up cannot be said: it has no limit, or does not grow."
    return {
        "id": one.id, "name": one.name, "actions": [],
        "facts": [("Stored", size(one.bytes), plural(one.runs, "run")), ("Full", ago(now - full) if full else NOTHING, "at the present pace" if full else "not in sight"),
                  ("Retention takes next", size(freed) if detail.retention else NOTHING, plural(len(detail.retention), "checkpoint") if detail.retention else "")],
        "tiers": [{"name": tier.name, "used": tier.used, "limit": tier.limit, "free": tier.free,
                   "picture": usage(tier.used or 0, tier.limit, f"{size(tier.used)} of {size(tier.limit)}")} for tier in detail.tiers],
        "trend": line([curve], [], f"bytes of {one.name} over days") if len(trend) > 1 else None,
        "trend_data": chart_data(curve, [], "days"), "forecast": f"Days before the newest save, bytes. {said}",
        "retention": [{"run": row.run, "id": row.id, "step": row.step, "what": row.what, "why": row.why, "bytes": row.bytes} for row in detail.retention],
        "retention_says": "Nothing: no run here has a rule that would let go of a checkpoint (keep=relight.keep(…)), or all that may go has gone.",
    }  # fmt: skip


def incident_row(one: Any, now: float) -> dict[str, Any]:
    """An incident in a list."""
    return {
        "href": at("incidents", one.store, one.run, one.id), "at": when(one.at, now), "run": one.run, "kind": one.kind,
        "step": one.step if one.step is None or one.step >= 0 else None,
        "action": one.action, "steps_lost": one.steps_lost, "seconds": one.seconds, "why": one.why,
    }  # fmt: skip


def incidents(rows: Sequence[Any], now: float) -> dict[str, Any]:
    """Which runs failed when, a lane a run, and each in words."""
    lanes_of: dict[str, list[Span]] = {}
    times = [(one, moment) for one in rows if (moment := seconds_of(one.at)) is not None]
    first = min((moment for _, moment in times), default=0.0)
    for one, moment in times:
        hours = (moment - first) / 3600
        lanes_of.setdefault(one.run, []).append(Span("failure", hours, hours + max((one.seconds or 0) / 3600, 0.0), f"{one.kind}: {one.why}"))
    says = f"{plural(len(rows), 'incident')}, hours since the first"
    return {
        "incidents": [incident_row(one, now) for one in rows], "says": says,
        "picture": lanes([Lane(name, spans) for name, spans in lanes_of.items()], says, unit="h") if lanes_of else None,
    }  # fmt: skip


def seconds_of(moment: float | str | None) -> float | None:
    """A time as seconds since 1970."""
    found = moment_of(moment)
    return None if found is None else found.timestamp()


def incident(one: Any, now: float) -> dict[str, Any]:
    """One incident, whole."""
    return {
        "kind": one.kind, "why": one.why, "action": one.action, "reason": one.reason,
        "facts": [("When", when(one.at, now), ""), ("Step", number(one.step), ""), ("Rank", number(one.rank), ""), ("Steps lost", number(one.steps_lost), ""),
                  ("Until training again", span(one.seconds), "")],
        "workers": "\n".join(str(worker) for worker in getattr(one, "workers", ())),
        "clues": [[str(cell) for cell in (clue if isinstance(clue, list | tuple) else [clue])] for clue in one.clues or ()],
        "words": "\n".join(one.words) if isinstance(one.words, list | tuple) else one.words or "",
        "stacks": list(one.stacks.items()) if isinstance(one.stacks, Mapping) else [(str(index), text) for index, text in enumerate(one.stacks or ())],
    }  # fmt: skip


def risk(rows: Sequence[Any], now: float) -> list[dict[str, Any]]:
    """Machines that look like failing."""
    return [
        {"href": of_run(one.store, one.run), "run": one.run, "node": one.node, "at": when(one.at, now), "by": one.detector, "risk": one.risk, "why": one.why,
         "picture": usage(one.risk or 0.0, 1.0, f"risk {share(one.risk)}")}
        for one in rows
    ]  # fmt: skip


def audit(rows: Sequence[Any], now: float) -> list[dict[str, Any]]:
    """Who did what."""
    health = {"ok": "good", "done": "good", "refused": "failed", "failed": "failed", "": "idle"}
    return [
        {"number": one.seq, "at": when(one.at, now), "who": one.who, "what": one.what, "on": one.on, "how": one.how or "begun", "health": health.get(one.how or "", "other")}
        for one in rows
    ]


def settings(told: Any, now: float) -> dict[str, Any]:
    """Tokens without their secrets, alert rules, what runs keep."""
    state = {"valid": "good", "expired": "idle", "revoked": "failed"}
    return {
        "tokens": [{"id": one.id, "name": one.name, "role": one.role, "scope": one.scope or "everything", "made": when(one.made_at, now),
                    "ends": when(one.ends_at, now) if one.ends_at else "never", "health": state.get(one.state, "other")} for one in told.tokens],
        "alerts": [{"name": one.name, "says": one.says, "severity": one.severity, "health": "failed" if one.firing else "good"} for one in told.alerts],
        "policies": [(str(name), str(says)) for name, says in told.policies],
    }  # fmt: skip


def action(name: str, verb: str, hidden: Sequence[tuple[str, str]], *fields: tuple[str, str, str]) -> dict[str, Any]:
    """A form that asks what an action would do. ``fields``: what it is called, its label, its value."""
    return {
        "name": name, "href": f"/act/{verb}", "hidden": list(hidden),
        "fields": [{"name": key, "label": label, "value": value, "required": not value} for key, label, value in fields],
    }  # fmt: skip


def actions_of_run(store: str, name: str) -> list[dict[str, Any]]:
    """What can be done with a run."""
    this = [("store", store), ("run", name)]
    return [action("Save now", "save", this), action("Prune", "prune", this), action("Drill", "drill", this)]


def actions_of_checkpoint(store: str, name: str, which: str) -> list[dict[str, Any]]:
    """What can be done with a checkpoint."""
    this = [("store", store), ("run", name), ("which", which)]
    return [
        action("Tag", "tag", this, ("name", "Tag", "")), action("Branch", "branch", this, ("to", "New run", "")), action("Pin", "pin", this), action("Verify", "verify", this),
        action("Promote", "promote", this, ("stage", "Stage", "production")),
    ]  # fmt: skip
