"""Where the entries of a DCP state dict are in a checkpoint's tree, and what DCP wants to know of them when it loads.

The tree is the state dict as it was before DCP flattened it. Below ``dcp`` it has, for each flat name, what DCP's own ``.metadata`` would
say and the tensors do not: ``entries: {name: (kind, path or None, position or None)}``, with ``path`` as the planner gave it and
``position`` where it is in the tree if that is elsewhere.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.nesting import Path, name_of

OWN = "dcp"
"""The key of the tree that is this room's."""
APART = "apart"
"""Below it are entries that have no place of their own in the tree."""
VERSION = 1
TENSOR, VALUE = "tensor", "value"
_RESERVED = re.compile(r"(?:dcp|rank|rng|grad)~*\Z")


class FlatName(NamedTuple):
    """One flat name of a state dict."""

    kind: str
    path: Path | None
    position: Path | None = None

    def at(self, name: str) -> Path:
        """Where it is in the tree."""
        return self.position if self.position is not None else usual(name, self.path)


def usual(name: str, path: Path | None) -> Path:
    """The position of an entry that gets in nobody's way: its path. Keys at the top that Relight uses itself get a ``~``."""
    position = path or (name,)
    first = position[0]
    return (f"{first}~", *position[1:]) if isinstance(first, str) and _RESERVED.match(first) else position


def apart(name: str) -> Path:
    """The position of one that does."""
    return (OWN, APART, name)


def encode_entries(entries: Mapping[str, FlatName], mapped: bool) -> dict[str, Any]:
    """What goes below ``dcp``."""
    return {"version": VERSION, "mapped": mapped, "entries": {name: tuple(entry) for name, entry in entries.items()}}


class Description(NamedTuple):
    """What a checkpoint says of itself below ``dcp``. ``mapped``: DCP's planner had flattened the state."""

    entries: dict[str, FlatName]
    mapped: bool


def decode_entries(tree: Mapping[Any, Any], where: str) -> Description:
    """What ``encode_entries`` gave. ``IncompatibleState`` if the checkpoint was not saved through DCP."""
    node = tree.get(OWN)
    if not isinstance(node, dict) or not isinstance(node.get("entries"), dict):
        raise IncompatibleState(
            "this checkpoint was not saved through torch.distributed.checkpoint",
            where=where,
            hint="restore it with relight.Checkpointer, or read it with relight.load",
        )
    if node.get("version") != VERSION:
        raise UnsafeContent(f"version {str(node.get('version'))[:20]} of what DCP needs", where=where, hint="upgrade relight")
    entries = {}
    for name, one in node["entries"].items():
        if not (isinstance(name, str) and isinstance(one, tuple) and len(one) == 3 and one[0] in (TENSOR, VALUE)):
            raise UnsafeContent("a malformed entry of a state dict", where=where)
        entries[name] = FlatName(one[0], _checked(one[1], where), _checked(one[2], where))
    return Description(entries, bool(node.get("mapped")))


def _checked(path: Any, where: str) -> Path | None:
    if path is None or (isinstance(path, tuple) and path and all(type(one) in (str, int) for one in path)):
        return path
    raise UnsafeContent("a malformed path of a state dict", where=where)


def node_at(tree: Any, position: Path, where: str) -> Any:
    """The node there; ``UnsafeContent`` if there is none."""
    node = tree
    try:
        for element in position:
            if not isinstance(node, (dict, list)):
                raise KeyError(element)
            node = node[element]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise UnsafeContent(f"nothing is at {name_of(position)[:80]!r}, which is said to be there", where=where) from None
    return node
