"""What a script does with its components: the batches that loaders deliver, the steps of optimizers, attributes that change."""

from __future__ import annotations

from collections.abc import Mapping

from relight.capture import unwatch_loaders, watch_loaders
from relight.checkpointer.outside_state import OutsideState
from relight.checkpointer.ungiven import UngivenOptimizers


class ComponentWatch:
    """The hooks and records of one Checkpointer, from its construction to its end."""

    def __init__(self, components: Mapping[str, object], reports: bool) -> None:
        """``reports``: whether this rank emits events about them."""
        self._components = components
        watch_loaders(components)
        self.ungiven = UngivenOptimizers(components, reports)
        self.outside = OutsideState(components, reports)

    @property
    def sentences(self) -> list[str]:
        """What changes in training and is in no checkpoint, a sentence each."""
        return [*self.ungiven.sentences, *self.outside.sentences]

    def saved(self) -> None:
        """Report, after one of the first saves, what is not in it. Each is reported once."""
        self.ungiven.saved()
        self.outside.saved()

    def close(self) -> None:
        """Remove all hooks. Twice is fine."""
        unwatch_loaders(self._components)
        self.ungiven.close()
