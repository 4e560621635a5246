"""The positions of a DCP state dict's entries in a checkpoint's tree, and the facts that DCP needs at a load.

The tree is the state dict before DCP flattened it. Below ``dcp`` it has an entry for each flat name:
``entries: {name: (kind, path or None, position or None)}``. These are the facts of DCP's own ``.metadata`` that tensors
lack. ``path`` is the planner's path; ``position`` is the position in the tree, if it differs from the path.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from relight.errors import IncompatibleState, UnsafeContent
from relight.importers.nesting import Path, name_of

OWN = "dcp"
"""The key of the tree that this room uses."""
APART = "apart"
"""Key for entries when another entry has their usual position."""
VERSION = 1
TENSOR, VALUE = "tensor", "value"
_RESERVED = re.compile(r"(?:dcp|rank|rng|grad)~*\Z")


class FlatName(NamedTuple):
    """One flat name of a state dict."""

    kind: str
    path: Path | None
    position: Path | None = None

    def at(self, name: str) -> Path:
        """Return its position in the tree."""
        return self.position if self.position is not None else usual(name, self.path)


def usual(name: str, path: Path | None) -> Path:
    """Return an entry's usual position: its path. Top-level keys that Relight uses itself get a ``~``."""
    position = path or (name,)
    first = position[0]
    return (f"{first}~", *position[1:]) if isinstance(first, str) and _RESERVED.match(first) else position


def apart(name: str) -> Path:
    """Return the position of an entry that conflicts with another one."""
    return (OWN, APART, name)


def encode_entries(entries: Mapping[str, FlatName], mapped: bool) -> dict[str, Any]:
    """Return the content of ``dcp``."""
    return {"version": VERSION, "mapped": mapped, "entries": {name: tuple(entry) for name, entry in entries.items()}}


class Description(NamedTuple):
    """A checkpoint's content of ``dcp``. ``mapped``: DCP's planner had flattened the state."""

    entries: dict[str, FlatName]
    mapped: bool


def decode_entries(tree: Mapping[Any, Any], where: str) -> Description:
    """Invert ``encode_entries``. Raise ``IncompatibleState`` if the checkpoint was not saved through DCP."""
    node = tree.get(OWN)
    if not isinstance(node, dict) or not isinstance(node.get("entries"), dict):
        raise IncompatibleState(
            "this checkpoint was not saved through torch.distributed.checkpoint",
            where=where,
            hint="restore it with relight.Checkpointer, or read it with relight.load",
        )
    if node.get("version") != VERSION:
        raise UnsafeContent(
            f"version {str(node.get('version'))[:20]} of what DCP needs", where=where, hint="upgrade relight"
        )
    entries = {}
    for name, entry in node["entries"].items():
        if not (isinstance(name, str) and isinstance(entry, tuple) and len(entry) == 3 and entry[0] in (TENSOR, VALUE)):
            raise UnsafeContent("a malformed entry of a state dict", where=where)
        entries[name] = FlatName(entry[0], _checked(entry[1], where), _checked(entry[2], where))
    return Description(entries, bool(node.get("mapped")))


def _checked(path: Any, where: str) -> Path | None:
    if path is None or (isinstance(path, tuple) and path and all(type(element) in (str, int) for element in path)):
        return path
    raise UnsafeContent("a malformed path of a state dict", where=where)


def node_at(tree: Any, position: Path, where: str) -> Any:
    """Return the node at a position. Raise ``UnsafeContent`` if there is none."""
    node = tree
    try:
        for element in position:
            if not isinstance(node, (dict, list)):
                raise KeyError(element)
            node = node[element]  # type: ignore[index]
    except (KeyError, IndexError, TypeError):
        raise UnsafeContent(
            f"the state dict has an entry at {name_of(position)[:80]!r}, but the tree has none", where=where
        ) from None
    return node
