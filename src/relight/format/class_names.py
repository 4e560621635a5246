"""Classes of components as a checkpoint's metadata records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASSES = "relight.classes"
"""Key of a checkpoint's metadata: ``{component: "module:qualified name"}`` of those that have a class of their own."""


def recorded_classes(user: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes in a checkpoint's metadata; empty if it has none, as one of an older Relight."""
    found = user.get(CLASSES)
    return {name: path for name, path in found.items() if isinstance(path, str)} if isinstance(found, dict) else {}


def name_in(path: str) -> str:
    """Return the class's name alone."""
    return path.rpartition(":")[2].rpartition(".")[2]
