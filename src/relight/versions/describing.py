"""Describe a checkpoint: a name relative to the nearest tag, its origin, and its metadata."""

from __future__ import annotations

from typing import Any

from relight.catalog.branches import PREFIX
from relight.catalog.run import Run
from relight.format.tree import join_path
from relight.log import Checkpoint, History
from relight.reader.merged_parts import whole_of
from relight.reader.opened import Opened
from relight.versions.stages import notes_of, promotions, stages_of

_POSITIONS = ("loader", "sampler")


def name_of(history: History, run: str, one: Checkpoint) -> str:
    """Return ``RUN@TAG`` for a tagged checkpoint, ``RUN@TAG+N`` for a tagged ancestor N checkpoints before, else ``RUN@STEP``."""
    known = {**history.retired, **history.by_id}
    ancestor: Checkpoint | None = one
    steps, seen = 0, set[str]()
    while ancestor is not None and ancestor.id not in seen:
        seen.add(ancestor.id)
        tags = [tag for tag in history.tags_of(ancestor.id) if not tag.startswith(PREFIX)]
        if tags:
            return f"{run}@{tags[0]}" + (f"+{steps}" if steps else "")
        ancestor = known.get(ancestor.body.parents[0]) if ancestor.body.parents else None
        steps += 1
    return f"{run}@{one.step}"


def describe(run: Run, one: Checkpoint) -> dict[str, Any]:
    """Return a checkpoint's origin, metadata, branches, stages and notes. Reads root and parts, no tensor."""
    view = run.view()
    history = run.history()
    opened = run.open(one)
    root = opened.root
    known = {**history.retired, **history.by_id}
    children = [other.id for other in history.live if one.id in other.body.parents]
    moves = [move._asdict() for move in promotions(view.records) if move.id == one.id]
    return {
        "name": name_of(history, run.name, one),
        "id": one.id,
        "step": one.step,
        "run": run.name,
        "lies_in": one.body.home or run.name,
        "created": root.created,
        "reason": root.reason,
        "parents": [{"id": parent, "step": known[parent].step if parent in known else None} for parent in root.parents],
        "children": children,
        "branches": [tag.removeprefix(PREFIX) for tag in history.tags_of(one.id) if tag.startswith(PREFIX)],
        "tags": [tag for tag in history.tags_of(one.id) if not tag.startswith(PREFIX)],
        "stages": stages_of(history, one.id),
        "promotions": moves,
        "notes": [note._asdict() for note in notes_of(history, one.id)],
        "metrics": root.metrics,
        "metadata": root.user,
        "code": root.environment.get("code"),
        "arguments": root.environment.get("argv"),
        "environment": {key: value for key, value in root.environment.items() if key not in ("code", "argv")},
        "world": root.world,
        "data": data_position(opened),
        "exact": root.exact,
        "suspect": one.body.suspect,
        "bytes": root.logical_bytes,
    }


def data_position(opened: Opened) -> dict[str, Any]:
    """Return the checkpoint's position in the data: the plain values of loaders and samplers, by path."""
    tree = whole_of(opened).tree
    names = [
        name
        for name, kind in opened.root.components.items()
        if kind in _POSITIONS or any(word in name for word in _POSITIONS)
    ]
    positions: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, join_path(path, key))
        elif isinstance(node, (str, int, float, bool)) and len(positions) < 40 and len(str(node)) < 100:
            positions[path] = node

    for name in names:
        walk(tree.get(name), name)
    return positions
