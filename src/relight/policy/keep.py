"""What to keep: rules, and the verdict on each checkpoint with its reasons."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from relight.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: those that any rule keeps. No rule at all keeps everything."""

    last: int | None = None
    best: int | None = None
    metric: str = "loss"
    mode: str = "min"
    every: int | None = None

    @property
    def is_everything(self) -> bool:
        """Whether nothing is ever removed."""
        return self.last is None and self.best is None and self.every is None


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live checkpoint as retention sees it. ``seq`` orders it; ``verified`` is True, False (known damaged) or None (not looked at)."""

    id: str
    seq: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    needed_by: Sequence[str] = ()
    verified: bool | None = None
    held: str = ""
    """Why it stays whatever the rules say, such as that a further tier lacks it."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """Whether one checkpoint stays, and why."""

    id: str
    step: int
    keep: bool
    reason: str


def keep(
    *, last: int | None = None, best: int | None = None, metric: str = "loss", mode: str = "min", every: int | None = None
) -> Keep:
    """Keep the ``last`` n, the ``best`` n by ``metric`` (``mode`` ``min`` or ``max``), and each whose step + 1 is a multiple of ``every``.

    Tagged checkpoints, the newest one, and the newest one that verifies always stay.
    """
    for name, value in (("last", last), ("best", best), ("every", every)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise ConfigError(f"{name} is a whole number from 1 up, not {value!r}")
    if mode not in ("min", "max"):
        raise ConfigError(f"mode is 'min' or 'max', not {mode!r}")
    return Keep(last, best, metric, mode, every)


def decide_keep(rules: Keep, checkpoints: Sequence[Candidate]) -> list[Verdict]:
    """A verdict for each of ``checkpoints``, in their order. Pure; no clock.

    Checkpoints known to be damaged do not count towards ``last`` and ``best``, and stay only if tagged or needed by another. If no
    checkpoint that stays is known to verify, nothing goes.
    """
    reasons: dict[str, list[str]] = {one.id: [] for one in checkpoints}
    newest_first = sorted(checkpoints, key=lambda one: -one.seq)
    sound = [one for one in newest_first if one.verified is not False]
    for one in newest_first[:1]:
        reasons[one.id].append("newest")
    newest_verified = next((one for one in newest_first if one.verified), None)
    if newest_verified:
        reasons[newest_verified.id].append("newest verified")
    for position, one in enumerate(sound[: rules.last or 0]):
        reasons[one.id].append(f"last {rules.last}: number {position + 1}")
    for position, one in enumerate(_best(rules, sound)):
        reasons[one.id].append(f"best {rules.best} by {rules.metric}: number {position + 1}")
    for one in checkpoints:
        if rules.every and one.verified is not False and (one.step + 1) % rules.every == 0:
            reasons[one.id].append(f"every {rules.every} steps")
        if one.tags:
            reasons[one.id].append(f"tagged {', '.join(one.tags)}")
        if one.held:
            reasons[one.id].append(one.held)
        if rules.is_everything:
            reasons[one.id].append("no rule removes anything")
    for one in newest_first:  # who needs another's bytes is newer than it: so what is needed by what is needed stays, too
        users = [user for user in one.needed_by if reasons.get(user)]
        if users:
            reasons[one.id].append(f"its bytes are needed by {', '.join(users)}")
    if not any(one.verified and reasons[one.id] for one in checkpoints):
        return [
            Verdict(one.id, one.step, True, ", ".join(reasons[one.id]) or "nothing that would stay is known to verify")
            for one in checkpoints
        ]
    return [
        Verdict(one.id, one.step, bool(reasons[one.id]), ", ".join(reasons[one.id]) or _why_not(rules, one))
        for one in checkpoints
    ]


def is_lasting(rules: Keep, one: Candidate, among: Sequence[Candidate]) -> bool:
    """Whether ``rules`` name it for good, rather than as one of the newest."""
    at_step = rules.every is not None and (one.step + 1) % rules.every == 0
    return bool(one.tags) or at_step or one in _best(rules, sorted(among, key=lambda other: -other.seq))


def _best(rules: Keep, sound: Sequence[Candidate]) -> list[Candidate]:
    if not rules.best:
        return []
    sign = 1.0 if rules.mode == "min" else -1.0
    scored = [one for one in sound if math.isfinite(one.metrics.get(rules.metric, math.nan))]
    return sorted(scored, key=lambda one: (sign * one.metrics[rules.metric], -one.seq))[: rules.best]


def _why_not(rules: Keep, one: Candidate) -> str:
    if one.verified is False:
        return "damaged, and no tag holds it"
    parts = []
    if rules.last:
        parts.append(f"not among the last {rules.last}")
    if rules.best:
        parts.append(f"not among the best {rules.best}")
    if rules.every:
        parts.append(f"not every {rules.every}")
    return ", ".join(parts)
