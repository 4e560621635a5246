"""Retention rules, and the verdict on each checkpoint with its reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

from relight.policy.argument_checks import checked_arguments
from relight.policy.best_by import listed, mode_for, mode_of, only_metric
from relight.policy.call_text import ShownAsCall
from relight.settings.checkpoint_settings import KeepSettings
from relight.settings.short_traceback import short_traceback
from relight.units import Duration, Size, duration_text, size_text


@dataclass(frozen=True, slots=True, repr=False)
class Keep(ShownAsCall):
    """Retention rules: a checkpoint stays if any rule keeps it. Without a rule, all stay."""

    _call: ClassVar[str] = "keep"
    _arguments: ClassVar[dict[str, str]] = {"within_s": "within", "undo_s": "undo_window"}

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    """The metric for ``best``; None: the run's own metric, else the only one that the checkpoints have. No metric is
    guessed."""
    mode: str | None = None
    every: int | None = None
    within_s: float | None = None
    hourly: int | None = None
    daily: int | None = None
    weekly: int | None = None
    monthly: int | None = None
    budget: int | None = None
    lag_steps: int | None = None
    undo_s: float | None = None
    """Seconds for which a retired checkpoint can be brought back. Not a rule: it keeps no checkpoint from being
    retired."""
    prune_abandoned: bool = False
    """Whether the rules also apply to abandoned checkpoints (not ancestors of the newest good one). False: all of them
    stay."""
    capacity: int | None = None
    """Bytes above which checkpoints are removed despite the rules: first the oldest that are also on another tier, then
    those that no further tier will get."""

    @property
    def is_everything(self) -> bool:
        """Return whether nothing is ever removed."""
        return self.capacity is None and all(getattr(self, name) is None for name in RULES)


RULES = ("last", "best", "every", "within_s", "hourly", "daily", "weekly", "monthly", "budget", "lag_steps")
"""The fields of ``Keep`` that are rules."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A live checkpoint as input of retention.

    ``seq`` orders it. ``step``: its step, counted from 0. ``verified``: True, False (known damaged) or None (not verified).
    """

    id: str
    seq: int
    step: int
    metrics: Mapping[str, float] = field(default_factory=dict)
    tags: Sequence[str] = ()
    needed_by: Sequence[str] = ()
    verified: bool | None = None
    held: str = ""
    """Why it stays despite the rules, such as that a further tier lacks it."""
    bytes: int = 0
    time_s: float | None = None
    """When it was committed, by the clock of the committing process: seconds since the epoch."""
    elsewhere: str = ""
    """Other places that have it; empty if none."""
    passed: bool = False
    """Whether the run has further tiers and none of them needs it any more: it is there, or a newer one will be copied
    instead."""
    routine: bool = False
    """Whether only a schedule requested it."""
    aside: bool = False
    """Whether a rollback returned to a checkpoint before it."""
    abandoned: bool = False
    """Whether it is not an ancestor of the newest good checkpoint: training started again from scratch, or from an
    older one."""
    label: int | None = None
    """The step as the run counts it; None: ``step``."""
    on_hold: bool = False
    """Whether a user has put it on hold: each further tier must then have it, as with a tag."""

    @property
    def shown_step(self) -> int:
        """The step's number for people."""
        return self.step if self.label is None else self.label


@dataclass(frozen=True, slots=True)
class KeepVerdict:
    """Decision whether one checkpoint stays, and its reasons."""

    id: str
    step: int
    keep: bool
    reason: str


@short_traceback
def keep(
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: Literal["min", "max"] | None = None,
    every: int | None = None,
    within: Duration | None = None,
    hourly: int | None = None,
    daily: int | None = None,
    weekly: int | None = None,
    monthly: int | None = None,
    budget: Size | None = None,
    lag_steps: int | None = None,
    undo_window: Duration | None = None,
    prune_abandoned: bool = False,
) -> Keep:
    """Return retention rules. A checkpoint stays if any of them keeps it.

    Tagged checkpoints, the newest one, and the newest one that verifies always stay. Checkpoints after a rollback's
    target count for no rule. The rules use the times of the records, not the clock; no record counts as later than the
    record after it.

    Abandoned checkpoints stay, and count for no rule and no budget: they are not ancestors of the newest good one,
    because training started again from scratch or from an older one.

    >>> keep(last=3, best=1, metric="val_acc")
    keep(last=3, best=1, metric='val_acc', mode='max')

    Args:
        last: Keep the newest n.
        best: Keep the best n by ``metric``. While no checkpoint has the metric, or no metric is known, all stay.
        metric: The metric of ``best``. None: that of ``save=relight.best(…)``, else the one that the run records, else
            the only one that its checkpoints have.
        mode: Whether less (``"min"``) or more (``"max"``) is better. None: a well-known name decides (``loss``: min,
            ``accuracy``: max).
        every: Keep one for each multiple of n steps: that of exactly this step (step + 1 is the multiple). If that save
            was postponed, the first one after it, up to one period late. If a whole period has none, the last one
            before it, less than a period early.
        within: Keep those within this time of the newest: ``"36h"``, a ``timedelta``, or seconds.
        hourly: Keep the newest of each of the last n hours that have one (UTC).
        daily: Keep the newest of each of the last n days that have one (UTC).
        weekly: Keep the newest of each of the last n weeks that have one (UTC).
        monthly: Keep the newest of each of the last n months that have one (UTC).
        budget: Keep the newest that fit into this size, with the checkpoints that they need: ``"500GB"``, or bytes.
        lag_steps: Always keep one that is n or more steps older than the newest, for damage to the model that is found
            late.
        undo_window: How long a removed checkpoint can be brought back by ``relight undelete``: ``"12h"``, a
            ``timedelta``, or seconds. It leaves the history at once, but its bytes stay for that time. They do not
            count for ``budget``.
        prune_abandoned: Apply the rules to abandoned checkpoints as well.
    """
    rules = checked_arguments(KeepSettings, locals(), required=("prune_abandoned",))
    if metric is not None:
        rules["mode"] = mode_for(metric, mode, needed=best is not None)
    return Keep(within_s=rules.pop("within"), undo_s=rules.pop("undo_window"), **rules)


def decide_keep(rules: Keep, checkpoints: Sequence[Candidate]) -> list[KeepVerdict]:
    """Return a verdict for each of ``checkpoints``, in their order. Pure; no clock.

    Checkpoints that are known to be damaged count for no rule, and stay only if tagged, held, or needed by another one.
    The same holds for checkpoints after a rollback's target, if there are others. If no checkpoint that stays is known
    to verify, all stay.
    """
    rules = _with_metric(rules, checkpoints)
    reasons: dict[str, list[str]] = {checkpoint.id: [] for checkpoint in checkpoints}
    newest_first = sorted(checkpoints, key=lambda checkpoint: -checkpoint.seq)
    spared = {
        checkpoint.id
        for checkpoint in checkpoints
        if checkpoint.abandoned and not checkpoint.aside and not rules.prune_abandoned
    }
    counted = [
        checkpoint for checkpoint in newest_first if not checkpoint.aside and checkpoint.id not in spared
    ] or newest_first
    sound = [checkpoint for checkpoint in counted if checkpoint.verified is not False]
    for checkpoint in counted[:1]:
        reasons[checkpoint.id].append("newest")
    newest_verified = next((checkpoint for checkpoint in counted if checkpoint.verified), None)
    if newest_verified:
        reasons[newest_verified.id].append("newest verified")
    ranked = _by_metric(rules, sound, counted)
    for checkpoint, reason in (
        *_by_count(rules, sound),
        *ranked,
        *_by_time(rules, sound),
        *_by_size(rules, sound),
        *_by_age(rules, sound),
    ):
        reasons[checkpoint.id].append(reason)
    for checkpoint in checkpoints:
        if checkpoint.id in spared:
            reasons[checkpoint.id].append(
                "abandoned: training did not continue from it (prune_abandoned removes such checkpoints)"
            )
        if checkpoint.tags:
            reasons[checkpoint.id].append(f"tagged {', '.join(checkpoint.tags)}")
        if checkpoint.held:
            reasons[checkpoint.id].append(checkpoint.held)
        if all(getattr(rules, name) is None for name in RULES):
            reasons[checkpoint.id].append("no rule removes anything")
    for checkpoint in newest_first:  # a checkpoint is newer than its donors, so this order keeps indirect needs as well
        users = [user for user in checkpoint.needed_by if reasons.get(user)]
        if users:
            reasons[checkpoint.id].append(f"its bytes are needed by {', '.join(users)}")
    if not any(checkpoint.verified and reasons[checkpoint.id] for checkpoint in checkpoints):
        return [
            KeepVerdict(
                checkpoint.id,
                checkpoint.shown_step,
                True,
                ", ".join(reasons[checkpoint.id]) or "nothing that would stay is known to verify",
            )
            for checkpoint in checkpoints
        ]
    evicted = _evicted(rules, newest_first, counted, reasons)
    return [
        KeepVerdict(checkpoint.id, checkpoint.shown_step, False, evicted[checkpoint.id])
        if checkpoint.id in evicted
        else KeepVerdict(
            checkpoint.id,
            checkpoint.shown_step,
            bool(reasons[checkpoint.id]),
            ", ".join(reasons[checkpoint.id]) or _why_not(rules, checkpoint),
        )
        for checkpoint in checkpoints
    ]


def _evicted(
    rules: Keep, newest_first: Sequence[Candidate], counted: Sequence[Candidate], reasons: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """Return the checkpoints to remove for lack of space, with reasons. Oldest first: those that are also on another
    tier; then those that no further tier will get, because newer ones are copied instead.

    Checkpoints with a tag or on hold stay, as do the newest, and the newest that verifies. One that ``every`` or
    ``best`` names stays until it is on a further tier. Without further tiers no checkpoint is ``passed``, so none is
    removed that is stored nowhere else.
    """
    staying = [checkpoint for checkpoint in newest_first if reasons[checkpoint.id]]
    over = sum(checkpoint.bytes for checkpoint in staying) - rules.capacity if rules.capacity is not None else 0
    spared = {
        checkpoint.id
        for checkpoint in (*counted[:1], *[checkpoint for checkpoint in counted if checkpoint.verified][:1])
    }
    evicted: dict[str, str] = {}
    for checkpoint in reversed(staying):
        needed = any(user not in evicted for user in checkpoint.needed_by)
        if (
            over > 0
            and checkpoint.elsewhere
            and checkpoint.id not in spared
            and not checkpoint.tags
            and not checkpoint.held
            and not needed
        ):
            evicted[checkpoint.id] = (
                f"the tier is above its {size_text(rules.capacity or 0)}, and it is on {checkpoint.elsewhere}"
            )
            over -= checkpoint.bytes
    named = lasting(rules, counted)
    for checkpoint in reversed(staying):
        needed = any(user not in evicted for user in checkpoint.needed_by)
        may_go = (
            checkpoint.passed
            and checkpoint.id not in spared
            and checkpoint.id not in evicted
            and not checkpoint.tags
            and not checkpoint.held
        )
        if over > 0 and may_go and checkpoint.id not in named and not needed:
            evicted[checkpoint.id] = (
                f"the tier is above its {size_text(rules.capacity or 0)}, and no further tier will get it: newer ones do"
            )
            over -= checkpoint.bytes
    return evicted


Kept = Iterator[tuple[Candidate, str]]


def _by_count(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    for position, checkpoint in enumerate(sound[: rules.last or 0]):
        yield checkpoint, f"last {rules.last}: number {position + 1}"
    kept = milestones(rules.every, sound)
    for checkpoint in sound:
        if rules.every and checkpoint.id in kept:
            here = (
                ""
                if kept[checkpoint.id] == checkpoint.step + 1
                else f": after {checkpoint.step + 1} steps in place of {kept[checkpoint.id]}"
            )
            yield checkpoint, f"every {rules.every} steps{here}"


def milestones(every: int | None, among: Sequence[Candidate]) -> dict[str, int]:
    """Map the id of each checkpoint that stands for a multiple of ``every`` steps to that multiple.

    The first checkpoint at or after a multiple stands for it, if it is less than ``every`` steps late. If there is
    none, and the run is past that point, the last checkpoint before the multiple does, if it is less than ``every``
    steps early. While steps only grow, a later checkpoint changes neither: pruning after each save keeps the same
    checkpoints as one pruning at the end.
    """
    if not every or not among:
        return {}
    done = sorted({checkpoint.step + 1 for checkpoint in among})
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for steps in done:
        first.setdefault(steps // every, steps)
        last[steps // every] = steps
    stands = {steps: period * every for period, steps in first.items() if period}
    for period, steps in last.items():
        if period + 1 not in first and period + 1 < done[-1] // every:
            stands.setdefault(steps, (period + 1) * every)
    return {checkpoint.id: stands[checkpoint.step + 1] for checkpoint in among if checkpoint.step + 1 in stands}


def _by_metric(rules: Keep, sound: Sequence[Candidate], checkpoints: Sequence[Candidate]) -> Kept:
    """Yield the best checkpoints. Yield all while the best are unknown: a misspelt metric must not delete what it
    should keep."""
    why = _unranked(rules, checkpoints) if rules.best else ""
    for position, checkpoint in enumerate(sound if why else _best(rules, sound)):
        yield (
            checkpoint,
            f"best {rules.best}: {why}"
            if why
            else f"best {rules.best} by {rules.metric} ({rules.mode}): number {position + 1}",
        )


def with_recorded(rules: Keep, recorded: tuple[str, str] | None) -> Keep:
    """Return ``rules`` with the metric that the run records, and its mode, if ``rules`` name none."""
    if recorded is None or rules.metric not in (None, recorded[0]):
        return rules
    return replace(rules, metric=recorded[0], mode=rules.mode or recorded[1])


def _with_metric(rules: Keep, checkpoints: Sequence[Candidate]) -> Keep:
    """Return ``rules`` with a metric and a mode, if only one can be meant."""
    if rules.metric is not None:
        return rules if rules.mode is not None else replace(rules, mode=mode_of(rules.metric))
    inferred = only_metric(_finite(checkpoints), rules.mode)
    return rules if inferred is None else replace(rules, metric=inferred.metric, mode=inferred.mode)


def _unranked(rules: Keep, checkpoints: Sequence[Candidate]) -> str:
    """Return the reason why ``rules`` cannot rank by a metric; empty if they can."""
    finite = _finite(checkpoints)
    if rules.metric is None:
        return f"no metric is named for it, and the checkpoints have {listed(finite)}"
    if rules.metric not in finite:
        return f"no checkpoint has a finite {rules.metric!r} yet (they have {listed(finite)})"
    return "" if rules.mode is not None else f"whether less or more of {rules.metric!r} is better is not known"


def _finite(checkpoints: Sequence[Candidate]) -> set[str]:
    return {name for checkpoint in checkpoints for name, value in checkpoint.metrics.items() if math.isfinite(value)}


def _by_time(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    """Yield what the time rules keep. A checkpoint with an unknown time is kept by each of them."""
    times = times_of(sound)
    newest = next((time_s for time_s in times if time_s is not None), 0.0)
    for checkpoint, time_s in zip(sound, times):
        if rules.within_s is not None and (time_s is None or newest - time_s <= rules.within_s):
            yield checkpoint, f"within {duration_text(rules.within_s)} of the newest"
    for name, bucket_of in _BUCKETS.items():
        count, seen = getattr(rules, name), list[float]()
        for checkpoint, time_s in zip(sound, times) if count else ():
            bucket = None if time_s is None else bucket_of(time_s)
            if bucket is None:
                yield checkpoint, f"{name} {count}: its time is not known"
            elif bucket not in seen and len(seen) < count:
                seen.append(bucket)
                yield checkpoint, f"{name} {count}: number {len(seen)}"


def _month(time_s: float) -> float:
    """Return the months since March of year 0, by the Gregorian calendar. In years that start in March the leap day is
    the last day."""
    days = int(time_s // 86400) + 719468
    era, day = divmod(days, 146097)
    year = (day - day // 1460 + day // 36524 - day // 146096) // 365
    in_year = day - (365 * year + year // 4 - year // 100)
    return (era * 400 + year) * 12 + (5 * in_year + 2) // 153


_BUCKETS: dict[str, Callable[[float], float]] = {
    "hourly": lambda time_s: time_s // 3600,
    "daily": lambda time_s: time_s // 86400,
    "weekly": lambda time_s: (time_s // 86400 + 3) // 7,  # weeks begin on Mondays, the epoch on a Thursday
    "monthly": _month,
}


def times_of(newest_first: Sequence[Candidate]) -> list[float | None]:
    """Return each checkpoint's commit time, lowered where a clock was wrong so that none is later than a newer
    checkpoint's."""
    times: list[float | None] = []
    least = math.inf
    for checkpoint in newest_first:
        least = least if checkpoint.time_s is None else min(least, checkpoint.time_s)
        times.append(None if checkpoint.time_s is None else least)
    return times


def _by_size(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    total, bytes_of, counted = 0, {checkpoint.id: checkpoint.bytes for checkpoint in sound}, set[str]()
    donors: dict[str, list[str]] = {}
    for checkpoint in sound:
        for user in checkpoint.needed_by:
            donors.setdefault(user, []).append(checkpoint.id)
    for checkpoint in sound if rules.budget is not None else ():
        with_it = {checkpoint.id, *donors.get(checkpoint.id, ())} - counted
        counted |= with_it
        total += sum(bytes_of[each] for each in with_it)
        if total > (rules.budget or 0):
            return
        yield checkpoint, f"the newest that fit into {size_text(rules.budget or 0)}"


def _by_age(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    """Yield the newest checkpoint that is old enough for ``lag_steps``, and the one that will replace it."""
    if rules.lag_steps is None or not sound:
        return
    limit = sound[0].step - rules.lag_steps
    old = next((checkpoint for checkpoint in sound if checkpoint.step <= limit), None)
    if old is not None:
        yield old, f"{rules.lag_steps} steps behind the newest, or more"
    younger = [
        checkpoint for checkpoint in sound if checkpoint.step > limit and (old is None or checkpoint.seq > old.seq)
    ]
    if younger:
        yield younger[-1], f"the next to be {rules.lag_steps} steps behind the newest"


def lasting(rules: Keep, among: Sequence[Candidate], had: Sequence[Candidate] = ()) -> set[str]:
    """Return the ids of checkpoints that stay for good (tags, holds, ``every``, ``best``), rather than as one of the
    newest.

    ``had``: checkpoints outside ``among`` that the store with these rules has or had. They influence which checkpoint
    stands for a multiple of ``every``.
    """
    counted = [
        checkpoint
        for checkpoint in (*among, *had)
        if checkpoint.verified is not False and not (checkpoint.aside or checkpoint.abandoned)
    ]
    named = {
        checkpoint.id
        for checkpoint in among
        if checkpoint.tags or checkpoint.on_hold or (rules.every and (checkpoint.step + 1) % rules.every == 0)
    }
    best = {
        checkpoint.id for checkpoint in _best(_with_metric(rules, among), sorted(among, key=lambda other: -other.seq))
    }
    return named | best | milestones(rules.every, counted).keys()


def _best(rules: Keep, sound: Sequence[Candidate]) -> list[Candidate]:
    if not rules.best or rules.metric is None or rules.mode is None:
        return []
    metric, sign = rules.metric, 1.0 if rules.mode == "min" else -1.0
    scored = [checkpoint for checkpoint in sound if math.isfinite(checkpoint.metrics.get(metric, math.nan))]
    return sorted(scored, key=lambda checkpoint: (sign * checkpoint.metrics[metric], -checkpoint.seq))[: rules.best]


def _why_not(rules: Keep, candidate: Candidate) -> str:
    if candidate.verified is False:
        return "damaged, and no tag holds it"
    if candidate.aside:
        return "training returned to an earlier step, and no tag holds it"
    words = {
        "last": "not among the last {}", "best": "not among the best {}", "every": "not every {}", "within_s": "older than {}",
        "hourly": "not the newest of one of the last {} hours", "daily": "not the newest of one of the last {} days",
        "weekly": "not the newest of one of the last {} weeks", "monthly": "not the newest of one of the last {} months",
        "budget": "beyond {}", "lag_steps": "not the one {} steps behind",
    }  # fmt: skip
    words["best"] = "not among the best {} by {metric}"
    text_of = {"within_s": duration_text, "budget": size_text}
    given = {name: value for name in words if (value := getattr(rules, name)) is not None}
    return ", ".join(
        words[name].format(text_of.get(name, str)(value), metric=rules.metric) for name, value in given.items()
    )
