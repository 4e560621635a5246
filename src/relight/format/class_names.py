"""Classes of components as a checkpoint's metadata records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CLASSES = "relight.classes"
"""Key in a checkpoint's metadata: ``{component: "module:qualified name"}`` of the components with a recorded class."""


def recorded_classes(user: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes in a checkpoint's metadata; empty if it has none, as in checkpoints of an older Relight."""
    classes = user.get(CLASSES)
    return {name: path for name, path in classes.items() if isinstance(path, str)} if isinstance(classes, dict) else {}


def name_in(path: str) -> str:
    """Return the class's name without module and outer classes."""
    return path.rpartition(":")[2].rpartition(".")[2]
