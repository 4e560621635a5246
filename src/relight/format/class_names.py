"""Classes of components as a checkpoint's metadata records them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from relight.format.root_keys import CLASSES


def recorded_classes(user: Mapping[str, Any]) -> dict[str, str]:
    """Return the classes in a checkpoint's metadata; empty if it has none, as in checkpoints of an older Relight."""
    classes = CLASSES.read(user) or {}
    return {name: path for name, path in classes.items() if isinstance(path, str)}


def name_in(path: str) -> str:
    """Return the class's name without module and outer classes."""
    return path.rpartition(":")[2].rpartition(".")[2]
