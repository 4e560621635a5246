"""The best value of each metric that a trigger asks for."""

from __future__ import annotations

from collections.abc import Mapping

from relight.catalog.find import best, metric_value
from relight.log import History
from relight.policy import Trigger


class BestSoFar:
    """``values`` by ``"name:mode"``, of what was saved."""

    def __init__(self, trigger: Trigger | None) -> None:
        self._wanted = tuple(trigger.metrics) if trigger is not None else ()
        self.values: dict[str, float] = {}

    def learn_from(self, history: History) -> None:
        """From the run's checkpoints."""
        for name, mode in self._wanted:
            found = best(history.live, name, mode)
            if found:
                self.values[f"{name}:{mode}"] = metric_value(found.body.metrics[name])

    def learn(self, metrics: Mapping[str, float]) -> None:
        """From a save's metrics."""
        for name, mode in self._wanted:
            value, known = metrics.get(name), self.values.get(f"{name}:{mode}")
            if value is not None and (known is None or (value < known if mode == "min" else value > known)):
                self.values[f"{name}:{mode}"] = value
