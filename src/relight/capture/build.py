"""A checkpoint as a plain tree, for ``relight.load``."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from relight.capture.rebuild import Memory, Thunk, build
from relight.format import Leaf, Tensor, decode_tree
from relight.format.tree import join_path
from relight.layout import Sink


def selected(path: str, only: Sequence[str] | None) -> bool:
    """Whether a pattern takes ``path``: itself, or as something below it."""
    return only is None or any(fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}/*") for pattern in only)


class LoadPlan:
    """Fill ``sinks``, then ask for ``result()``."""

    def __init__(self, sinks: dict[int, Sink], result: Thunk) -> None:
        self.sinks = sinks
        self.result = result


class _Nothing:
    """Stands for what was not selected."""


_NOTHING = _Nothing()


def build_tree(tensors: Sequence[Tensor], tree: bytes, *, only: Sequence[str] | None = None, where: str) -> LoadPlan:
    """Plan the plain tree: dicts, lists, values, CPU tensors, arrays. With ``only``, just what matches, in the dicts that lead to it."""
    memory = Memory(tensors)
    root = decode_tree(tree, len(tensors), lambda leaf, path: leaf, where)
    made = _plan(root, "", memory, only)
    return LoadPlan(memory.sinks, lambda: {} if made is _NOTHING else made())


def thunks(node: Any, path: str, memory: Memory) -> Thunk:
    """What makes the value of a decoded node, whole."""
    made: Thunk = _plan(node, path, memory, None)
    return made


def _plan(node: Any, path: str, memory: Memory, only: Sequence[str] | None) -> Any:
    if only is not None and path and selected(path, only):
        only = None
    if isinstance(node, dict):
        parts = {key: _plan(value, join_path(path, key), memory, only) for key, value in node.items()}
        kept = {key: part for key, part in parts.items() if part is not _NOTHING}
        return _NOTHING if only is not None and not kept else lambda: {key: part() for key, part in kept.items()}
    if isinstance(node, (list, tuple)):
        items = [_plan(value, join_path(path, i, sequence=True), memory, only) for i, value in enumerate(node)]
        if only is not None and any(item is _NOTHING for item in items):
            return _NOTHING
        kind = type(node)
        return lambda: kind(item() for item in items)
    if only is not None:
        return _NOTHING
    if type(node) is Leaf:
        return build(node, memory, path)
    return lambda: node
