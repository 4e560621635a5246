"""The best value so far of each metric that a trigger needs, and the run's own metric."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from relight.catalog.find import best, metric_value
from relight.checkpointer.awaited import MultiRankWait
from relight.checkpointer.hooks import CommittedSave, Hook
from relight.checkpointer.save_handle import Save
from relight.commit import Attempt
from relight.errors import ConfigError, StoreUnavailable, with_outcome
from relight.log import History
from relight.observe import emit
from relight.policy import Keep, Tiers, Trigger
from relight.policy.best_by import listed
from relight.run_records.best_by import record_best_by


class BestSoFar(Hook):
    """Best values among checkpoints and saves in progress. ``awaited``: metrics that no step has given yet.

    ``under_way`` returns the metrics of the saves in progress. A save that fails or gives its slot to another drops out of it, so its
    values count no longer.
    """

    def __init__(
        self,
        trigger: Trigger | None,
        keep: Keep | None = None,
        tiers: Tiers | None = None,
        rank: int = 0,
        under_way: Callable[[], Iterable[Mapping[str, float]]] = tuple,
    ) -> None:
        self._wanted = tuple(trigger.metrics) if trigger is not None else ()
        self._leads = rank == 0
        rules = [
            rule
            for rule in (keep, *(tier.keep for tier in (tiers.further if tiers is not None else ())))
            if rule is not None
        ]
        self._own = own_metric(trigger, rules)
        self._under_way = under_way
        self.durable: dict[str, float] = {}
        """Best values of checkpoints alone, by ``"name:mode"``."""
        self._due: dict[str, float] = {}
        """Values, by metric name, that made a save due before it was started: a postponed save, or a save of several ranks."""
        self._warned = False
        self.awaited = MultiRankWait(trigger, rules, self._leads)

    def on_attempt(self, attempt: Attempt, history: History) -> None:
        """Learn from the run's checkpoints; on rank 0, record the run's own metric. Cost: one record, if it is new."""
        self.learn_from(history)
        if self._leads:
            try:
                record_best_by(attempt.place.log, self._own, attempt.epoch)
            except StoreUnavailable as error:
                emit(
                    "preflight.warning",
                    f"the run's metric could not be recorded: {with_outcome(error, 'the next attempt records it')}",
                )
            history.best_by = self._own or history.best_by
        self.awaited.begin(history)

    def learn_from(self, history: History) -> None:
        """Learn from the run's checkpoints."""
        for name, mode in self._wanted:
            checkpoint = best(history.live, name, mode)
            if checkpoint:
                self.durable[f"{name}:{mode}"] = metric_value(checkpoint.metrics[name])

    @property
    def values(self) -> dict[str, float]:
        """The best values, by ``"name:mode"``."""
        values = dict(self.durable)
        for metrics in self._under_way() if self._wanted else ():
            self._add(values, metrics)
        return values

    def on_start(self, save: Save, metrics: Mapping[str, float]) -> None:
        """Learn that a save with these metrics was started."""
        self.awaited.saved(metrics)
        self._due.clear()

    def on_durable(self, done: CommittedSave) -> None:
        """Learn that a save became a checkpoint."""
        self._add(self.durable, done.metrics)

    def note(self, values: dict[str, float]) -> dict[str, float]:
        """Remember the values of a step that are better than in any checkpoint, and return all values."""
        if self._wanted:
            best = self.values
            for name, mode in self._wanted:
                if name in values and _is_better(values[name], mode, best.get(f"{name}:{mode}")):
                    self._due[name] = values[name]
        return values

    def due(self, metrics: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the metrics of a save that a trigger made due: those of its step, and the noted ones that the step lacks."""
        return {**self._due, **metrics} if self._due else metrics

    def postponed(self, values: dict[str, float], why: str) -> None:
        """Warn, once in a process, if a postponed save was due for the best value so far: the weights of that step are not saved."""
        if self._warned:
            return
        self.note(values)
        for name, value in self._due.items():
            self._warned = True
            emit(
                "preflight.warning",
                f"{name} {value:g} is the best so far, and the weights that gave it are not saved, because {why}; "
                'Limits(when_busy="queue") makes training wait for such a save',
            )

    def on_failure(self, save: Save) -> None:
        """Forget the noted values: the save that they made due has failed."""
        self._due.clear()

    def _add(self, values: dict[str, float], metrics: Mapping[str, float]) -> None:
        for name, mode in self._wanted:
            key = f"{name}:{mode}"
            if name in metrics and _is_better(metrics[name], mode, values.get(key)):
                values[key] = metrics[name]


def _is_better(value: float, mode: str, best: float | None) -> bool:
    """Return whether a value is the best so far. NaN and infinite values never are: no later value would be better than NaN."""
    return math.isfinite(value) and (best is None or (value < best if mode == "min" else value > best))


def own_metric(trigger: Trigger | None, rules: Sequence[Keep]) -> tuple[str, str] | None:
    """Return the metric and mode of a run's "best": those of its retention rules, nearest tier first, else those of its
    trigger.

    Raise ``ConfigError`` if a rule needs a metric, names none, and the trigger has several.
    """
    for keep in rules:
        if keep.metric is not None and keep.mode is not None:
            return keep.metric, keep.mode
    named = sorted(trigger.best_by) if trigger is not None else []
    unnamed = next((keep for keep in rules if keep.best), None)
    if unnamed is not None and len(named) > 1:
        raise ConfigError(
            f"keep(best={unnamed.best}) names no metric, and save= goes by {listed([name for name, _ in named])}",
            hint=f'name one: keep(best={unnamed.best}, metric="{named[0][0]}")',
        )
    return named[0] if len(named) == 1 else None
