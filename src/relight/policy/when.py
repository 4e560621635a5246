"""When to save: triggers, combined with ``|``."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from relight.errors import ConfigError

if TYPE_CHECKING:
    from relight.policy.adaptive import Adaptive


@dataclass(frozen=True, slots=True)
class Facts:
    """What a trigger may look at. Times are seconds of one monotonic clock."""

    step: int
    now_s: float
    last_save_step: int | None
    last_save_s: float
    """When the last save started, or the loop did."""
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    """Best value of each metric among committed checkpoints, by the trigger's own mode, under ``name:mode``."""
    interval_s: float | None = None
    """What ``relight.adaptive()`` has come to; None on ranks that another decides for."""


class Trigger:
    """Something that may ask for a save. ``a | b`` asks when either does."""

    def due(self, facts: Facts) -> str | None:
        """The reason to save now, or None."""
        raise NotImplementedError

    def by_step(self, step: int) -> str | None:
        """The reason to save now, as far as the step's number tells it: then all ranks of a job come to the same by themselves."""
        return None

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        """``(name, mode)`` of the metrics it looks at."""
        return frozenset()

    @property
    def adapts(self) -> Adaptive | None:
        """The part of it that wants an interval worked out, if it has one."""
        return None

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            return NotImplemented
        return _Any((self, other))


@dataclass(frozen=True, slots=True)
class _Any(Trigger):
    parts: tuple[Trigger, ...]

    def due(self, facts: Facts) -> str | None:
        reasons = [reason for part in self.parts if (reason := part.due(facts))]
        return ", ".join(reasons) or None

    def by_step(self, step: int) -> str | None:
        return ", ".join(reason for part in self.parts if (reason := part.by_step(step))) or None

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(part.metrics for part in self.parts))

    @property
    def adapts(self) -> Adaptive | None:
        return next((found for part in self.parts if (found := part.adapts) is not None), None)


@dataclass(frozen=True, slots=True)
class _Every(Trigger):
    steps: int | None
    seconds: float | None

    def due(self, facts: Facts) -> str | None:
        by_step = self.by_step(facts.step)
        if by_step is not None:
            return by_step
        if self.seconds and facts.now_s - facts.last_save_s >= self.seconds:
            return f"every {self.seconds / 60:g} minutes"
        return None

    def by_step(self, step: int) -> str | None:
        # Counted on the step number, not since the last save: a resumed run saves where the uninterrupted one would.
        return f"every {self.steps} steps" if self.steps and (step + 1) % self.steps == 0 else None


@dataclass(frozen=True, slots=True)
class _Best(Trigger):
    metric: str
    mode: str

    def due(self, facts: Facts) -> str | None:
        value = facts.metrics.get(self.metric)
        if value is None or not math.isfinite(value):
            return None
        known = facts.best.get(f"{self.metric}:{self.mode}")
        if known is None or (value < known if self.mode == "min" else value > known):
            return f"best {self.metric}: {value:.6g}"
        return None

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        return frozenset({(self.metric, self.mode)})


def every(*, steps: int | None = None, minutes: float | None = None) -> Trigger:
    """Save after every ``steps`` steps (after step ``steps − 1``, ``2·steps − 1``, …, counting from 0), or ``minutes`` after the last save.

    >>> every(steps=2).due(Facts(step=3, now_s=0, last_save_step=None, last_save_s=0))
    'every 2 steps'
    """
    if steps is None and minutes is None:
        raise ConfigError("every() needs steps=, minutes=, or both", hint="relight.every(steps=500) | relight.every(minutes=10)")
    if steps is not None and (not isinstance(steps, int) or isinstance(steps, bool) or steps < 1):
        raise ConfigError(f"steps is a whole number from 1 up, not {steps!r}")
    if minutes is not None and not (isinstance(minutes, (int, float)) and 0 < minutes < math.inf):
        raise ConfigError(f"minutes is a positive number, not {minutes!r}")
    return _Every(steps, None if minutes is None else minutes * 60.0)


def best(metric: str, mode: str = "min") -> Trigger:
    """Save whenever ``metric``, as given to ``ckpt.step``, is better than in any checkpoint so far; ``mode`` is ``min`` or ``max``."""
    if mode not in ("min", "max"):
        raise ConfigError(f"mode is 'min' or 'max', not {mode!r}")
    return _Best(metric, mode)


def check_trigger(value: Any) -> Trigger:
    """``value`` if it is a trigger, else ``ConfigError``."""
    if not isinstance(value, Trigger):
        raise ConfigError(f"save= takes relight.every(…), relight.best(…) and relight.adaptive(…), not {value!r}")
    return value
