"""Flat names of a state dict, and the tree that it was before it was flattened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from relight.errors import UnsafeContent
from relight.format.tree import join_path

Path = tuple[str | int, ...]
DEPTH_MAX = 80


def name_of(position: Path) -> str:
    """What a tensor there is called."""
    name = ""
    for element in position:
        name = join_path(name, element, sequence=isinstance(element, int))
    return name


def crowded(positions: Mapping[str, Path]) -> set[str]:
    """Names whose positions cannot be in one tree with the others': one is what another is below of, or both are the same."""
    taken: dict[Path, str] = {}
    inner: dict[Path, type] = {}
    found: set[str] = set()
    for name, position in positions.items():
        above = [(position[:level], type(position[level])) for level in range(1, min(len(position), DEPTH_MAX + 1))]
        if (
            len(position) > DEPTH_MAX
            or position in taken
            or position in inner
            or any(one in taken or inner.get(one, kind) is not kind for one, kind in above)
        ):
            found.add(name)
            continue
        taken[position] = name
        inner.update(above)
    return found


def nested(nodes: Iterable[tuple[Path, Any]]) -> dict[Any, Any]:
    """The tree that has each node at its position. Places in a list that nobody has are None."""
    root: dict[Any, Any] = {}
    for position, node in nodes:
        at = root
        for element in position[:-1]:
            at = at.setdefault(element, {})
        at[position[-1]] = node
    built: dict[Any, Any] = {key: _lists(value) for key, value in root.items()}
    return built


class OpaqueNode:
    """A node that is not looked into when lists are made of dicts whose keys are numbers."""

    __slots__ = ("node",)

    def __init__(self, node: Any) -> None:
        self.node = node


def _lists(node: Any) -> Any:
    if type(node) is OpaqueNode:
        return node.node
    if type(node) is not dict:
        return node
    if node and all(type(key) is int for key in node):
        if not 0 <= min(node) <= max(node) < 2 * len(node) + 1000:  # places that nobody has cost memory
            raise UnsafeContent(f"a list of {len(node)} elements, one of which is number {max(node)}")
        return [_lists(node.get(index)) for index in range(max(node) + 1)]
    return {key: _lists(value) for key, value in node.items()}
