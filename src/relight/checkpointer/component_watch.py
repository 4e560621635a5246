"""Hooks on what a script does with its components: the batches that loaders deliver, the steps of optimizers."""

from __future__ import annotations

from collections.abc import Mapping

from relight.capture import unwatch_loaders, watch_loaders
from relight.checkpointer.ungiven import UngivenOptimizers


class ComponentWatch:
    """The hooks of one Checkpointer, from its construction to its end."""

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events about them."""
        self._components = components
        watch_loaders(components)
        self.ungiven = UngivenOptimizers(components, reports)

    def close(self) -> None:
        """Remove all hooks. Twice is fine."""
        unwatch_loaders(self._components)
        self.ungiven.close()
