"""The metric that "best" goes by: names, modes, and the selectors ``best``, ``best:NAME`` and ``best:NAME:MODE``. Pure."""

from __future__ import annotations

import re
from collections.abc import Collection
from difflib import get_close_matches
from typing import NamedTuple

from relight.errors import CheckpointNotFound, ConfigError
from relight.policy.argument_checks import name_of, one_of
from relight.settings.kinds import Mode, choices

BEST = "best"
"""The selector; alone, or followed by ``:NAME`` or ``:NAME:MODE``."""
MODES = choices(Mode)
LESS_IS_BETTER = frozenset(["loss", "error", "ppl", "perplexity", "wer", "cer", "mse", "mae", "rmse", "nll"])
MORE_IS_BETTER = frozenset(
    [
        "acc",
        "accuracy",
        "f1",
        "auc",
        "bleu",
        "rouge",
        "score",
        "reward",
        "return",
        "map",
        "precision",
        "recall",
        "iou",
        "dice",
        "r2",
    ]
)
SHOWN = 12
"""Metrics that a message lists."""
ALIKE = 0.8
"""Similarity (``difflib``) from which a name is taken for a misspelling of another.

``val_los`` is one of ``val_loss``. ``loss`` is not: it is another metric, and an epoch's metric may come later.
"""


class BestBy(NamedTuple):
    """A metric, whether its ``min`` or its ``max`` is best, and how it was chosen: empty if the caller named it."""

    metric: str
    mode: str
    why: str = ""

    def __str__(self) -> str:
        return f"{self.metric} ({self.mode})"


def mode_of(metric: str) -> str | None:
    """Return ``min`` or ``max`` for a well known name, by its words; None if no word is known, or if two contradict each other."""
    words = re.findall(r"[A-Z]?[a-z]+\d*|[A-Z]+(?![a-z])\d*", metric)
    known = {word.lower() for word in words} | {word.lower().rstrip("0123456789") for word in words}
    less, more = bool(known & LESS_IS_BETTER), bool(known & MORE_IS_BETTER)
    return None if less == more else "min" if less else "max"


def mode_for(metric: str, mode: str | None, needed: bool = True) -> str | None:
    """Return ``mode``, or the usual one of a well known name. ``ConfigError`` if neither is known and it is ``needed``: none is guessed."""
    name_of(metric, "metric")
    resolved = mode_of(metric) if mode is None else one_of(mode, MODES, "mode")
    if resolved is None and needed:
        raise ConfigError(
            f"mode is missing: whether less or more of {metric!r} is better is unknown",
            hint='add mode="min" or mode="max"',
        )
    return resolved


def only_metric(names: Collection[str], mode: str | None = None) -> BestBy | None:
    """Return the metric if ``names`` has exactly one and its mode is known."""
    name = next(iter(names)) if len(names) == 1 else ""
    known_mode = mode or mode_of(name)
    return BestBy(name, known_mode, "the only metric that the checkpoints have") if name and known_mode else None


def is_best(which: str | int) -> bool:
    """Return whether ``which`` is one of the selectors."""
    return isinstance(which, str) and (which == BEST or which.startswith(f"{BEST}:"))


def selector(metric: str | None, mode: str | None) -> str:
    """Return the selector that names what is given."""
    if metric is None and mode is not None:
        raise ConfigError("a mode needs a metric", hint=f"add --metric NAME to --mode {mode}")
    return ":".join([BEST, *([metric] if metric else []), *([mode] if mode else [])])


def best_by(which: str, recorded: tuple[str, str] | None, names: Collection[str]) -> BestBy:
    """Resolve a selector. ``recorded`` is the run's own metric and mode, ``names`` are the metrics that its checkpoints have.

    Without a name the recorded metric is taken, else the only one. ``ConfigError`` lists the metrics if there are several.
    """
    _, _, rest = which.partition(":")
    if not rest:
        if recorded is not None:
            return BestBy(*recorded, "the metric that the run records")
        metric = only_metric(names)
        if metric is not None:
            return metric
        if len(names) > 1:
            what = f"{BEST!r} is ambiguous: the checkpoints have {listed(names)}, and the run records no metric"
            raise ConfigError(what, hint=_ways(names))
        rest = next(iter(names), "")
    name, _, last = rest.rpartition(":")
    if last in MODES and name and rest not in names:
        return BestBy(name, last)
    if recorded is not None and recorded[0] == rest:
        return BestBy(*recorded)
    mode = mode_of(rest)
    if mode is None and rest not in names:
        raise no_metric(rest, names)
    if mode is None:
        raise ConfigError(
            f"mode is missing: whether less or more of {rest!r} is better is unknown",
            hint=f"write {BEST}:{rest}:min or {BEST}:{rest}:max",
        )
    return BestBy(rest, mode)


def no_metric(name: str, names: Collection[str]) -> CheckpointNotFound:
    """Return the error for a metric that no checkpoint has."""
    what = f"no checkpoint has a finite metric {name!r}{meant(name, names)}"
    return CheckpointNotFound(
        what, hint=f"the checkpoints have {listed(names)}" if names else "pass it to ckpt.step(…, name=value)"
    )


def listed(names: Collection[str]) -> str:
    """Return the names for a message, sorted and bounded."""
    shown = ", ".join(sorted(names)[:SHOWN]) or "none"
    return f"{shown} and {len(names) - SHOWN} more" if len(names) > SHOWN else shown


def meant(name: str, names: Collection[str]) -> str:
    """Return ``; did you mean …?`` if ``name`` is probably a misspelling of one of the names, or an empty text."""
    close = get_close_matches(name, sorted(names), n=1, cutoff=ALIKE)
    return f"; did you mean {close[0]}?" if close else ""


def _ways(names: Collection[str]) -> str:
    name = min(names, key=lambda name: (mode_of(name) is None, name))
    way = f"{BEST}:{name}:{mode_of(name) or 'max'}"
    return (
        f'name it, such as {way}; keep(best=…, metric="{name}", mode=…) in the training script records it for the run'
    )
