"""A foreign checkpoint as it was found: which format, what of it is imported, what is not and why."""

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
    """A checkpoint of another framework. ``parts``: component → what it is; ``left_out``: ``(what, why)``; ``bytes``: of all tensors."""

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
    """Why a resume from it is not exact, or what was done to names."""
    files: Files = field(default=None, repr=False)  # type: ignore[assignment]
    content: Content = field(default=None, repr=False)  # type: ignore[assignment]


@dataclass
class Planted:
    """A content as Relight will save it."""

    tree: bytes
    items: list[Item]
    kinds: dict[str, str]
    parts: dict[str, str]
    left_out: list[tuple[str, str]]


def plant(content: Content, files: Files, which: Sequence[str] = ()) -> Planted:
    """Lay it out as a ``Checkpointer`` would have; of it only what matches one of ``which``, if there are any."""
    planter = TreeBuilder(sum(stamp.size for stamp in files.stamps.values()), files.path, _wanted(which))
    tree: dict[str, object] = {}
    kinds: dict[str, str] = {}
    parts: dict[str, str] = {}
    ordered = sorted(content.components.items(), key=lambda pair: pair[1].kind != MODULE)  # names of tensors that are shared are a module's
    for name, part in ordered:
        path = join_path("", name)
        if not _touches(which, path):
            planter.left_out.append((name, "not asked for"))
            continue
        before = len(planter.items)
        if part.kind == MODULE:
            there, node = True, planter.module(part.node, path, part.trained)
            there = bool(node)
        else:
            there, node = planter.value(part.node, path, {OPTIMIZER: "optim", "rng": "rng"}.get(part.kind, "value"))
        if there:
            tree[name], kinds[name] = node, part.kind
            parts[name] = _summary(part.kind, planter.items[before:], content, name)
    if content.kept and _touches(which, KEPT):
        before = len(planter.items)
        there, node = planter.value(content.kept, KEPT)
        if there and node:
            tree[KEPT], kinds[KEPT] = node, "value"
            parts[KEPT] = f"{_listed(node)}: kept as values{_tensors(planter.items[before:])}"
    planter.finish()
    return Planted(encode_tree(tree), planter.items, kinds, parts, [*content.left_out, *planter.left_out])


def found_of(content: Content, files: Files) -> DetectedCheckpoint:
    """What there is to say of it."""
    content.name_trained()
    planted = plant(content, files)
    by_number = content.indexed()
    notes = [*content.notes, *(f"{one}: parameters by number, taken in the live optimizer's order" for one in by_number)]
    return DetectedCheckpoint(
        content.format, content.kind, files.path, content.step, sum(item.source.length for item in planted.items), len(planted.items),
        planted.parts, planted.left_out, dict(content.metrics), notes, files, content,
    )  # fmt: skip


def _summary(kind: str, items: Sequence[Item], content: Content, name: str) -> str:
    told = f"{kind}{_tensors(items)}"
    if kind == OPTIMIZER:
        told += ", parameters by number" if name in content.indexed() else ", parameters by name"
    return told


def _listed(names: Iterable[object]) -> str:
    """The first names, as many as fit on a line."""
    told = sorted(map(str, names))
    shown = [name for index, name in enumerate(told) if len(", ".join(told[: index + 1])) <= 40] or [told[0][:40]]
    return ", ".join(shown) + (f" and {len(told) - len(shown)} more" if len(told) > len(shown) else "")


def _tensors(items: Sequence[Item]) -> str:
    return f", {len(items)} tensors, {sum(item.source.length for item in items)} bytes" if items else ""


def _wanted(which: Sequence[str]) -> Callable[[str], bool] | None:
    if not which:
        return None
    return lambda path: any(fnmatchcase(path, one) or fnmatchcase(path, f"{one.rstrip('/')}/*") for one in which)


def _touches(which: Sequence[str], path: str) -> bool:
    """Whether something of a component may match."""
    return not which or any(fnmatchcase(path, one.split("/")[0]) for one in which)
