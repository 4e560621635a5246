"""Count complete training epochs, for triggers that save by epochs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import DataLoader

from relight.capture import epochs_of
from relight.checkpointer.metric_values import number_of
from relight.errors import ConfigError
from relight.policy import EpochsDone, Trigger

METRIC = "epoch"
"""The metric that counts training epochs where no loader is a component."""
_HOW = 'give the loader to the Checkpointer (data=loader), or step(…, epoch=epoch) at each step; of several, every(epochs=1, loader="data")'


class EpochCount:
    """Counts the epochs of one Checkpointer's loaders from step to step. Without a trigger that asks for them it does nothing."""

    def __init__(self, components: Mapping[str, object]) -> None:
        self._loaders = {name: value for name, value in components.items() if isinstance(value, DataLoader)}
        self._before: dict[str, int] = {}

    def forget(self) -> None:
        """Begin to count again: a restore may move the loaders to any epoch."""
        self._before = {}

    def count(self, trigger: Trigger | None, metrics: Mapping[str, Any]) -> dict[str, EpochsDone]:
        """Return the epochs of each loader that ``trigger`` names, at the end of this step. Call it once for each step.

        ``ConfigError`` if a name is not a loader's, or if no loader is known and ``metrics`` have no ``epoch``.
        """
        return {name: self._of(name, metrics) for name in (trigger.epochs_of if trigger is not None else ())}

    def _of(self, name: str, metrics: Mapping[str, Any]) -> EpochsDone:
        if name and name not in self._loaders:
            message = f"every(epochs=…, loader={name!r}) names no loader among the components"
            raise ConfigError(
                message, where="save=", hint=f"there are {', '.join(self._loaders)}" if self._loaders else _HOW
            )
        if name or len(self._loaders) == 1:
            first, now, later = epochs_of(self._loaders[name] if name else next(iter(self._loaders.values())))
        elif METRIC in metrics:
            value = number_of(METRIC, metrics[METRIC])
            first = now = later = self._before.get(name, 0) if value is None else int(value)
        else:
            which = (
                f"one of the loaders {', '.join(self._loaders)}" if self._loaders else "a loader, or epoch= of step()"
            )
            raise ConfigError(f"every(epochs=…) needs {which}", where="save=", hint=_HOW)
        before = self._before.get(name, first)
        self._before[name] = now
        return EpochsDone(before, now, later)
