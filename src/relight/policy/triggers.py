"""When to save: triggers, combined with ``|``."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple

from relight.errors import ConfigError, shown
from relight.policy.argument_checks import checked_arguments, whole_of
from relight.policy.best_by import mode_for
from relight.policy.call_text import ShownAsCall
from relight.save_reason import Kind, SaveReason
from relight.settings.amounts import seconds_of
from relight.settings.checkpoint_settings import EverySettings
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, duration_text


class EpochsDone(NamedTuple):
    """Complete training epochs of one loader, at three steps."""

    before: int
    """At the end of the step before."""
    now: int
    """At the end of this step."""
    next: int
    """At the end of the next step, if it takes as many batches as this one."""


@dataclass(frozen=True, slots=True)
class TriggerInput:
    """Input of a trigger. Times are seconds of one monotonic clock.

    Args:
        step: The step that ended.
        now_s: The time now.
        last_save_step: The step of the last save. None: there was none.
        last_save_s: When the last save started, or the loop did.
        metrics: Values of the metrics that ``Trigger.metrics`` names.
        best: The best value of each metric in ``Trigger.best_by`` among committed checkpoints, by the trigger's own
            mode, under ``name:mode``.
        interval_s: The interval that ``relight.adaptive()`` has computed, in seconds; None on ranks for which another
            rank decides.
        previous: The last step that ended before this one. The script left out the steps between the two.
        epochs: Complete training epochs by the name of each loader in ``Trigger.epochs_of``: ``before`` this step,
            ``now``, and ``next``, at the next step.
    """

    step: int
    now_s: float
    last_save_step: int | None
    last_save_s: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, float] = field(default_factory=dict)
    interval_s: float | None = None
    previous: int | None = None
    epochs: Mapping[str, EpochsDone] = field(default_factory=dict)


class Trigger:
    """Decides when to save. A subclass overrides ``due``, and whichever of the other methods it needs. ``a | b`` saves when either does.

    Each rank calls its own trigger at most once a step, at the step's end, in the training thread. All ranks save together: at this step if
    ``by_step`` gives a reason on every rank, else at the next one.
    """

    kind: ClassVar[Kind] = "trigger"
    """``SaveReason.kind`` of the saves that it requests."""

    def due(self, facts: TriggerInput) -> str | None:
        """Return the reason to save now, or None. The reason is a printable text; the checkpoint records it.

        Args:
            facts: All that it may know.
        """
        raise NotImplementedError

    def by_step(self, step: int, previous: int | None = None) -> str | None:
        """Return the reason to save at this step, computed from its number alone, or None.

        It must be the same on all ranks, which then save at this very step without asking each other.

        Args:
            step: The number of the step that ended.
            previous: The step before. The script left out those between.
        """
        return None

    def soon(self, facts: TriggerInput) -> bool:
        """Return whether ``due`` will give a reason at the next step. Then several ranks, which agree a step ahead, save
        at that step.

        Args:
            facts: All that it may know, at the step before.
        """
        return False

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        """``(name, mode)`` of the metrics that ``due`` reads in ``TriggerInput.metrics``. No other metrics are in there."""
        return frozenset()

    @property
    def epochs_of(self) -> frozenset[str]:
        """Names of the loaders; ``due`` reads their epochs in ``TriggerInput.epochs``. An empty name: the only loader."""
        return frozenset()

    @property
    def best_by(self) -> frozenset[tuple[str, str]]:
        """``(name, mode)`` of each metric for which the trigger saves the best values."""
        return frozenset()

    @property
    def only_best(self) -> bool:
        """Return whether it saves nothing but best values: if their metrics never come, it never saves."""
        return False

    def __or__(self, other: Trigger) -> Trigger:
        if not isinstance(other, Trigger):
            return NotImplemented
        return _Any((self, other))


@dataclass(frozen=True, slots=True, repr=False)
class _Any(Trigger):
    parts: tuple[Trigger, ...]

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))

    def flat(self) -> Iterator[Trigger]:
        """Yield the triggers that this one consists of."""
        for part in self.parts:
            yield from part.flat() if isinstance(part, _Any) else (part,)

    def due(self, facts: TriggerInput) -> str | None:
        reasons = [reason for part in self.parts if (reason := part.due(facts))]
        return ", ".join(reasons) or None

    def by_step(self, step: int, previous: int | None = None) -> str | None:
        return ", ".join(reason for part in self.parts if (reason := part.by_step(step, previous))) or None

    def soon(self, facts: TriggerInput) -> bool:
        return any(part.soon(facts) for part in self.parts)

    @property
    def metrics(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(part.metrics for part in self.parts))

    @property
    def epochs_of(self) -> frozenset[str]:
        return frozenset().union(*(part.epochs_of for part in self.parts))

    @property
    def best_by(self) -> frozenset[tuple[str, str]]:
        return frozenset().union(*(part.best_by for part in self.parts))

    @property
    def only_best(self) -> bool:
        return all(part.only_best for part in self.parts)


@dataclass(frozen=True, slots=True, repr=False)
class _Every(ShownAsCall, Trigger):
    _call: ClassVar[str] = "every"
    kind: ClassVar[Kind] = "every"
    steps: int | None
    seconds: float | None

    def due(self, facts: TriggerInput) -> str | None:
        by_step = self.by_step(facts.step, facts.previous)
        if by_step is not None:
            return by_step
        if self.seconds and facts.now_s - facts.last_save_s >= self.seconds:
            return f"every {duration_text(self.seconds)}"
        return None

    def by_step(self, step: int, previous: int | None = None) -> str | None:
        # Counted on the step number, not since the last save: a resumed run saves where the uninterrupted one would. If the script reports
        # no end of the very step (it left the iteration early), the next reported step is saved: no multiple is lost.
        before = step if previous is None or previous >= step else previous + 1
        return f"every {self.steps} steps" if self.steps and (step + 1) // self.steps > before // self.steps else None


@dataclass(frozen=True, slots=True, repr=False)
class _Epochs(ShownAsCall, Trigger):
    _call: ClassVar[str] = "every"
    kind: ClassVar[Kind] = "every"
    epochs: int
    loader: str = ""

    def due(self, facts: TriggerInput) -> str | None:
        done = facts.epochs.get(self.loader)
        if done is None or done.now // self.epochs <= done.before // self.epochs:
            return None
        return f"every {self.epochs} epochs: {done.now} done" if self.epochs > 1 else f"every epoch: {done.now} done"

    def soon(self, facts: TriggerInput) -> bool:
        done = facts.epochs.get(self.loader)
        return done is not None and done.next // self.epochs > done.now // self.epochs

    @property
    def epochs_of(self) -> frozenset[str]:
        return frozenset({self.loader})


@dataclass(frozen=True, slots=True, repr=False)
class _Best(ShownAsCall, Trigger):
    _call: ClassVar[str] = "best"
    kind: ClassVar[Kind] = "best"
    metric: str
    mode: str

    def due(self, facts: TriggerInput) -> str | None:
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

    best_by = metrics

    @property
    def only_best(self) -> bool:
        return True


def reason_now(trigger: Trigger | None, facts: TriggerInput) -> SaveReason | None:
    """Return the reason to save now, by ``Trigger.due``, or None."""
    return _reason(trigger, lambda part: part.due(facts))


def reason_by_step(trigger: Trigger | None, step: int, previous: int | None) -> SaveReason | None:
    """Return the reason to save at this step, by ``Trigger.by_step``, or None."""
    return _reason(trigger, lambda part: part.by_step(step, previous))


def parts_of(trigger: Trigger | None) -> tuple[Trigger, ...]:
    """Return the triggers that ``|`` has joined to this one; itself if it is not a union."""
    if trigger is None:
        return ()
    return tuple(trigger.flat()) if isinstance(trigger, _Any) else (trigger,)


def text_to_compare(trigger: Trigger | None) -> str | None:
    """Return a text that ranks compare: its parts that save at a step without asking other ranks must be equal.

    Of a user's own class it has only the name. None without a trigger.
    """
    parts = [each for each in parts_of(trigger) if type(each).by_step is not Trigger.by_step]
    texts = {repr(each) if isinstance(each, _Every) else type(each).__name__ for each in parts}
    return None if trigger is None else " | ".join(sorted(texts))


def _reason(trigger: Trigger | None, text_of: Callable[[Trigger], str | None]) -> SaveReason | None:
    """Return the joined texts of all parts that are due. Its kind is that of the first one that is not ``adaptive``."""
    due = [(part.kind, text) for part in parts_of(trigger) if (text := text_of(part))]
    if not due:
        return None
    kind: Kind = next((kind for kind, _ in due if kind != "adaptive"), "adaptive")
    return SaveReason(kind, ", ".join(text for _, text in due))


@short_traceback
def every(
    amount: int | Duration | None = None,
    /,
    *,
    steps: int | None = None,
    minutes: float | None = None,
    hours: float | None = None,
    seconds: float | None = None,
    epochs: int | None = None,
    loader: str | None = None,
) -> Trigger:
    """Save after every n steps, or when a time has passed since the last save.

    A save by steps is due after step ``steps − 1``, ``2·steps − 1``, …, counting from 0. With steps and a time, a save
    is due at whichever comes first. ``hours``, ``minutes`` and ``seconds`` add up.

    Epochs are counted by the loader among the components; without a loader, by the ``epoch=`` that ``step()`` is given.
    An epoch of a length unknown to the loader, or that ``epoch=`` counts, has ended when the next one begins: the first
    step of that one is saved.

    >>> every(steps=2).due(TriggerInput(step=3, now_s=0, last_save_step=None, last_save_s=0))
    'every 2 steps'

    Args:
        amount: A whole number counts steps. A text or a ``timedelta`` is what its unit names: ``every(500)``,
            ``every("500 steps")``, ``every("10m")``.
        steps: The number of steps between saves.
        minutes: Minutes between saves.
        hours: Hours between saves.
        seconds: Seconds between saves.
        epochs: The number of training epochs between saves, which are made at an epoch's last step.
        loader: The name of the loader that counts epochs. None: the only one.
    """
    if amount is not None and not all(value is None for value in (steps, minutes, hours, seconds, epochs)):
        raise ConfigError(f"every({shown(amount)}) and a named amount", hint="relight.every(steps=500, minutes=10)")
    given = checked_arguments(EverySettings, locals())
    counted, time_s = _amount(amount)
    counted = given["steps"] or counted
    units = {"hours": 3600.0, "minutes": 60.0, "seconds": 1.0}
    times = [given[name] * unit for name, unit in units.items() if given[name] is not None]
    if loader is not None and (epochs is None or not isinstance(loader, str)):
        raise ConfigError(
            f"every(loader=…) names the loader of epochs=, not {shown(loader)}", hint='every(epochs=1, loader="data")'
        )
    by_epoch = _Epochs(given["epochs"], loader or "") if epochs is not None else None
    if counted is None and time_s is None and not times:
        if by_epoch is None:
            raise ConfigError(
                "every() needs steps, a time, or epochs", hint="relight.every(steps=500) | relight.every(minutes=10)"
            )
        return by_epoch
    otherwise = _Every(counted, sum(times) if times else time_s)
    return otherwise | by_epoch if by_epoch is not None else otherwise


_STEPS = re.compile(r"\s*([0-9]{1,15})\s*steps?\s*\Z", re.IGNORECASE)


def _amount(amount: Any) -> tuple[int | None, float | None]:
    """Steps and seconds of an amount that no name explains. A float could be either: it is refused."""
    if amount is None:
        return None, None
    if isinstance(amount, str):
        steps = _STEPS.match(amount)
        if steps is not None:
            return whole_of(int(steps[1]), "steps"), None
        if amount.strip().isdigit():
            hint = f'relight.every({amount.strip()}) counts steps, relight.every("{amount.strip()}m") minutes'
            raise ConfigError(f"every({amount!r}) has no unit", hint=hint)
        return None, seconds_of(amount, 'every("…")')
    if hasattr(amount, "total_seconds"):
        return None, seconds_of(amount, "every(…)")
    if isinstance(amount, float):
        raise ConfigError(
            f"every({amount!r}) could be steps or a time", hint="relight.every(steps=500), relight.every(minutes=10)"
        )
    return whole_of(amount, "every(…)"), None


@short_traceback
def best(metric: str, mode: Literal["min", "max"] | None = None) -> Trigger:
    """Save whenever a metric is better than in any checkpoint so far.

    >>> best("val_acc").metrics
    frozenset({('val_acc', 'max')})

    Args:
        metric: The metric's name, as ``ckpt.step`` is given it.
        mode: Whether less (``"min"``) or more (``"max"``) is better. None: a well known name decides (``val_loss``:
            min, ``accuracy``: max), and another name is a ``ConfigError``.
    """
    known = mode_for(metric, mode)
    assert known is not None
    return _Best(metric, known)


def check_trigger(value: Any) -> Trigger:
    """``value`` if it is a trigger, else ``ConfigError``."""
    if isinstance(value, Trigger):
        return value
    hint = ""
    if isinstance(value, (int, str)) and not isinstance(value, bool):
        hint = f"save=relight.every({value!r})"
        try:
            every(value)
        except ConfigError:
            hint = "such as save=relight.every(steps=500), save=relight.every(epochs=1)"
    elif isinstance(value, bool):
        hint = "leave save= out for relight.adaptive(); save=None saves only when asked, on signals and at the end"
    elif callable(value):
        hint = f"call it: save=relight.{getattr(value, '__name__', 'every')}(…)"
    raise ConfigError(
        f"save= takes relight.every(…), relight.best(…), relight.adaptive(…) or None, not {shown(value)}", hint=hint
    )
