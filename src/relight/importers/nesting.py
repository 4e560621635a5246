"""Flat names of a state dict, and the nested tree that they stand for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from relight.errors import UnsafeContent
from relight.format.tree import join_path

Path = tuple[str | int, ...]
DEPTH_MAX = 80


def name_of(position: Path) -> str:
    """Return the name of a tensor at a position."""
    name = ""
    for element in position:
        name = join_path(name, element, sequence=isinstance(element, int))
    return name


def crowded(positions: Mapping[str, Path]) -> set[str]:
    """Return the names with a conflicting position: equal to another's, or below another's value."""
    owners: dict[Path, str] = {}
    inner: dict[Path, type] = {}
    conflicts: set[str] = set()
    for name, position in positions.items():
        above = [(position[:level], type(position[level])) for level in range(1, min(len(position), DEPTH_MAX + 1))]
        if (
            len(position) > DEPTH_MAX
            or position in owners
            or position in inner
            or any(parent in owners or inner.get(parent, kind) is not kind for parent, kind in above)
        ):
            conflicts.add(name)
            continue
        owners[position] = name
        inner.update(above)
    return conflicts


def nested(nodes: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """Return the tree with each node at its position. Missing list elements are None."""
    root: dict[Any, Any] = {}
    for position, node in nodes:
        parent = root
        for element in position[:-1]:
            parent = parent.setdefault(element, {})
        parent[position[-1]] = node
    built: dict[Any, Any] = {key: _lists(value) for key, value in root.items()}
    return built


class OpaqueNode:
    """A node with content that stays unchanged when dicts with numeric keys become lists."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def _lists(node: Any) -> Any:
    if type(node) is OpaqueNode:
        return node.node
    if type(node) is not dict:
        return node
    if node and all(type(key) is int for key in node):
        if not 0 <= min(node) <= max(node) < 2 * len(node) + 1000:  # missing elements cost memory
            raise UnsafeContent(f"a list of {len(node)} elements with the index {max(node)}")
        return [_lists(node.get(index)) for index in range(max(node) + 1)]
    return {key: _lists(value) for key, value in node.items()}
