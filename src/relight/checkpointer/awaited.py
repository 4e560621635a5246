"""Detect metrics that triggers or retention need and no step gives: a misspelt name must be reported before the run
ends."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from relight.catalog.find import finite_metrics
from relight.checkpointer.metric_values import is_finite
from relight.comm import RankTimeout
from relight.errors import ConfigError
from relight.log import History
from relight.observe import emit
from relight.policy import Keep, Trigger
from relight.policy.best_by import listed, meant, only_metric
from relight.ranks.group import RankGroup

WARN_STEPS = 10
"""Steps without the metric until a warning, where only ``best(…)`` saves."""
WARN_STEPS_ELSE = 1_000
"""Steps without the metric until a warning, where other triggers save as well."""
TYPO_STEPS = 20_000
"""Steps until an error, where only ``best(…)`` saves and a metric with a similar name was given.

Ranks compare at its multiples.
"""
NEVER_STEPS = 100_000
"""Steps until an error, where only ``best(…)`` saves: evaluations may be rare, every 10,000 steps or more."""
SEEN_MAX = 256
"""Names of metrics that are remembered."""


class MultiRankWait:
    """Metrics of one Checkpointer that no step has given yet. Without missing metrics it costs nothing.

    Only a job that saves nothing without them is ended: a retention rule with a missing metric keeps every checkpoint.
    Several ranks end at the same step, because each counts its steps, and a metric may be given on only one of them.
    """

    def __init__(self, trigger: Trigger | None, rules: Sequence[Keep], leads: bool) -> None:
        self._alone = trigger is not None and trigger.only_best
        """Whether the job saves nothing until one of its metrics is given."""
        self._leads = leads
        names = sorted(trigger.best_by) if trigger is not None and (leads or self._alone) else []
        ranking = [keep for keep in rules if keep.best and leads]
        self._due = {metric: f'save=best("{metric}")' for metric, _ in names}
        """Metrics of the trigger without a finite value in any step."""
        self._kept = {
            keep.metric: f'keep(best={keep.best}, metric="{keep.metric}")'
            for keep in ranking
            if keep.metric is not None
        }
        """Metrics of retention without a finite value in any save."""
        self._unnamed = next((f"keep(best={keep.best})" for keep in ranking if keep.metric is None), "")
        self._came = False
        """Whether this rank was given a metric of the trigger, or a checkpoint has one: then something is saved."""
        self._seen: set[str] = set()
        self._steps = 0
        self._warned: set[str] = set()
        self._typos: set[str] = set()
        """Metrics of the trigger with names that are probably misspellings of given ones."""

    def begin(self, history: History) -> None:
        """Stop waiting for metrics that checkpoints of the run have."""
        if history.best_by is not None:
            self._unnamed = ""
        for name in finite_metrics(history):
            self._came |= self._due.pop(name, None) is not None
            self._kept.pop(name, None)

    def step(
        self, metrics: Mapping[str, Any], micro_step: int | None, save: Callable[[], object], ranks: RankGroup
    ) -> None:
        """Count a step that ended.

        If a metric has been missing for too long, call ``save()`` and raise ``ConfigError`` on every rank.
        """
        if micro_step is not None or not (self._due or self._kept or (self._alone and ranks.several)):
            return
        self._steps += 1
        self._observe(metrics)
        for name in [name for name in self._due if name in metrics and is_finite(name, metrics[name])]:
            del self._due[name]
            self._came = True
        patience = WARN_STEPS if self._alone else WARN_STEPS_ELSE
        for name, rule in self._due.items() if self._leads else ():
            if name not in self._warned and (self._steps >= patience or name in self._typos):
                self._warn(name, rule, "it saves nothing until then")
        if self._alone:
            error = self._error_of_all(ranks) if ranks.several else self._error()
            if error is not None:
                save()  # no other save has the training so far
                raise error

    def saved(self, numbers: Mapping[str, float]) -> None:
        """Count a save that has these metrics."""
        self._observe(numbers)
        for name in [name for name in self._kept if math.isfinite(numbers.get(name, math.nan))]:
            del self._kept[name]
        for name, rule in self._kept.items():
            if name not in self._warned:
                self._warn(name, rule, "that rule keeps every checkpoint until one has it")
        if self._unnamed and numbers and only_metric(numbers) is None:
            text = f"{self._unnamed} names no metric, and this save has {listed(numbers)}: it keeps every checkpoint until one is named"
            emit("metric.missing", text, metric="", rule=self._unnamed, seen=sorted(numbers))
            self._unnamed = ""

    def _observe(self, metrics: Mapping[str, Any]) -> None:
        count = len(self._seen)
        if count < SEEN_MAX:
            self._seen.update(metrics)
        if len(self._seen) != count:  # comparing names at every step would cost more than the step's other bookkeeping
            missing = [name for name in self._due if name not in self._seen]
            self._typos = {name for name in missing if meant(name, self._seen)}

    def _warn(self, name: str, rule: str, then: str) -> None:
        self._warned.add(name)
        emit("metric.missing", f"{rule}: {self._what(name)}; {then}", metric=name, rule=rule, seen=sorted(self._seen))

    def _what(self, name: str) -> str:
        """Return a phrase about a metric that no step or save has given yet."""
        if name in self._seen:
            also = " at a step that was saved" if name in self._kept and name not in self._due else ""
            return f"no finite value of {name!r} was given yet{also}"
        return f"no step has given {name!r} yet{meant(name, self._seen)} (given so far: {listed(self._seen)})"

    def _error(self) -> ConfigError | None:
        if self._came:
            return None
        for name, rule in self._due.items():
            if self._steps >= (TYPO_STEPS if name in self._typos else NEVER_STEPS):
                return self._never(name, rule)
        return None

    def _error_of_all(self, ranks: RankGroup) -> ConfigError | None:
        """Return the lowest rank's error if no rank has a metric. All ranks exchange at steps that each knows by its own count."""
        if ranks.lost or (self._steps % TYPO_STEPS and self._steps % NEVER_STEPS):
            return None
        own_error = self._error()
        message = "came" if self._came else "" if own_error is None else json.dumps([own_error.what, own_error.hint])
        try:
            messages = [data.decode() for data in ranks.world.gather(message.encode(), "comparing which metrics came")]
        except RankTimeout:  # the next save reports it
            return None
        if "came" in messages:
            self._alone = False  # the same on every rank: no further exchange
            return None
        message_text, hint = next((json.loads(message) for message in messages if message), ("", ""))
        return ConfigError(message_text, hint=hint) if message_text else None

    def _never(self, name: str, rule: str) -> ConfigError:
        return ConfigError(
            f"{rule} never took effect in {self._steps:,} steps: {self._what(name)}",
            hint=f"pass it: ckpt.step(step, {name}=value) at every evaluation; or name a metric that step() is given",
        )
