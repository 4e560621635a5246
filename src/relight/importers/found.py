"""A recognised foreign checkpoint: its format, its imported parts, and what is left out and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from relight.format import encode_tree
from relight.format.tree import join_path
from relight.importers.content import KEPT, MODULE, OPTIMIZER, Content
from relight.importers.files import Files
from relight.importers.tree_builder import TreeBuilder
from relight.layout import Item


@dataclass
class DetectedCheckpoint:
    """A checkpoint of another framework.

    ``parts``: component → summary. ``left_out``: ``(what, why)``. ``bytes``: of all tensors.
    """

    format: str
    kind: str
    path: str
    step: int | None
    bytes: int
    tensors: int
    parts: dict[str, str]
    left_out: list[tuple[str, str]]
    metrics: dict[str, float]
    notes: list[str] = field(default_factory=list)
    """Why a resume from it is not exact, and changes of names."""
    files: Files = field(default=None, repr=False)  # type: ignore[assignment]
    content: Content = field(default=None, repr=False)  # type: ignore[assignment]


@dataclass
class Planted:
    """A foreign checkpoint's content in the form in which Relight saves it."""

    tree: bytes
    items: list[Item]
    kinds: dict[str, str]
    parts: dict[str, str]
    left_out: list[tuple[str, str]]


def plant(content: Content, files: Files, which: Sequence[str] = ()) -> Planted:
    """Return the content as a ``Checkpointer`` would save it. ``which``: patterns of names to take; empty for all."""
    planter = TreeBuilder(sum(stamp.size for stamp in files.stamps.values()), files.path, _wanted(which))
    tree: dict[str, object] = {}
    kinds: dict[str, str] = {}
    parts: dict[str, str] = {}
    # a shared tensor gets its name from a module
    ordered = sorted(content.components.items(), key=lambda pair: pair[1].kind != MODULE)
    for name, part in ordered:
        path = join_path("", name)
        if not _touches(which, path):
            planter.left_out.append((name, "not asked for"))
            continue
        before = len(planter.items)
        if part.kind == MODULE:
            exists, node = True, planter.module(part.node, path, part.trained)
            exists = bool(node)
        else:
            exists, node = planter.value(part.node, path, {OPTIMIZER: "optim", "rng": "rng"}.get(part.kind, "value"))
        if exists:
            tree[name], kinds[name] = node, part.kind
            parts[name] = _summary(part.kind, planter.items[before:], content, name)
    if content.kept and _touches(which, KEPT):
        before = len(planter.items)
        exists, node = planter.value(content.kept, KEPT)
        if exists and node:
            tree[KEPT], kinds[KEPT] = node, "value"
            parts[KEPT] = f"{_listed(node)}: kept as values{_tensors(planter.items[before:])}"
    planter.finish()
    return Planted(encode_tree(tree), planter.items, kinds, parts, [*content.left_out, *planter.left_out])


def found_of(content: Content, files: Files) -> DetectedCheckpoint:
    """Return the description of a content."""
    content.name_trained()
    planted = plant(content, files)
    by_number = content.indexed()
    notes = [
        *content.notes,
        *(f"{name}: parameters by number, taken in the live optimizer's order" for name in by_number),
    ]
    return DetectedCheckpoint(
        content.format, content.kind, files.path, content.step, sum(item.source.length for item in planted.items), len(planted.items),
        planted.parts, planted.left_out, dict(content.metrics), notes, files, content,
    )  # fmt: skip


def _summary(kind: str, items: Sequence[Item], content: Content, name: str) -> str:
    summary = f"{kind}{_tensors(items)}"
    if kind == OPTIMIZER:
        summary += ", parameters by number" if name in content.indexed() else ", parameters by name"
    return summary


def _listed(names: Iterable[object]) -> str:
    """Return the first names, as many as fit on a line."""
    ordered = sorted(map(str, names))
    shown = [name for index, name in enumerate(ordered) if len(", ".join(ordered[: index + 1])) <= 40] or [
        ordered[0][:40]
    ]
    return ", ".join(shown) + (f" and {len(ordered) - len(shown)} more" if len(ordered) > len(shown) else "")


def _tensors(items: Sequence[Item]) -> str:
    return f", {len(items)} tensors, {sum(item.source.length for item in items)} bytes" if items else ""


def _wanted(which: Sequence[str]) -> Callable[[str], bool] | None:
    if not which:
        return None
    return lambda path: any(
        fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern.rstrip('/')}/*") for pattern in which
    )


def _touches(which: Sequence[str], path: str) -> bool:
    """Return whether part of a component may match."""
    return not which or any(fnmatchcase(path, pattern.split("/")[0]) for pattern in which)
