"""Describe a checkpoint: a name relative to the nearest tag, its origin, stages, notes, and its position in the data."""

from __future__ import annotations

from typing import Any

from relight.catalog.branches import PREFIX
from relight.format.tree import join_path
from relight.log import Checkpoint, History, LogView
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


def describe(view: LogView, history: History, run: str, opened: Opened) -> dict[str, Any]:
    """Return where an open checkpoint of ``run`` comes from, what it led to, and what people recorded about it."""
    root = opened.root
    known = {**history.retired, **history.by_id}
    return {
        "name": name_of(history, run, known[root.id]),
        "run": run,
        "origin": [{"id": parent, "step": known[parent].step if parent in known else None} for parent in root.parents],
        "children": [other.id for other in history.live if root.id in other.body.parents],
        "branches": [tag.removeprefix(PREFIX) for tag in history.tags_of(root.id) if tag.startswith(PREFIX)],
        "stages": stages_of(history, root.id),
        "promotions": [move._asdict() for move in promotions(view.records) if move.id == root.id],
        "notes": [note._asdict() for note in notes_of(history, root.id)],
        "data": data_position(opened),
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
