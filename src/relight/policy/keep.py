"""What to keep: rules, and the verdict on each checkpoint with its reasons."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from relight.policy.best_by import MODES, listed, mode_for, mode_of, only_metric
from relight.policy.units import Duration, bytes_of, check_bool, one_of, seconds_of, whole_of


@dataclass(frozen=True, slots=True)
class Keep:
    """Which checkpoints stay: those that any rule keeps. No rule at all keeps everything."""

    last: int | None = None
    best: int | None = None
    metric: str | None = None
    """What ``best`` goes by; None: the run's own metric, else the only one that the checkpoints have. No metric is guessed."""
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
    """How long what goes may be recalled. No rule: it keeps nothing from going."""
    prune_abandoned: bool = False
    """Whether the rules also apply to abandoned checkpoints: no ancestors of the newest good one. False: all of them stay."""
    capacity: int | None = None
    """Bytes above which the oldest go that are elsewhere too, then those that no further tier will get, whatever the rules say."""

    @property
    def is_everything(self) -> bool:
        """Whether nothing is ever removed."""
        return self.capacity is None and all(getattr(self, name) is None for name in RULES)


RULES = ("last", "best", "every", "within_s", "hourly", "daily", "weekly", "monthly", "budget", "lag_steps")
"""The fields of ``Keep`` that are rules."""


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
    bytes: int = 0
    time_s: float | None = None
    """When it was committed, as whoever committed it saw the clock: seconds since the epoch."""
    elsewhere: str = ""
    """Where else it is, safely; empty if nowhere."""
    passed: bool = False
    """Whether there are further tiers, and none of them lacks it: it is there, or a newer one will be in its place."""
    routine: bool = False
    """Whether nothing but a schedule asked for it."""
    aside: bool = False
    """Whether training went back behind it."""
    abandoned: bool = False
    """Whether it is no ancestor of the newest good checkpoint: training began again from scratch, or from an older one."""


@dataclass(frozen=True, slots=True)
class KeepVerdict:
    """Whether one checkpoint stays, and why."""

    id: str
    step: int
    keep: bool
    reason: str


def keep(
    *,
    last: int | None = None,
    best: int | None = None,
    metric: str | None = None,
    mode: str | None = None,
    every: int | None = None,
    within: str | float | Duration | None = None,
    hourly: int | None = None,
    daily: int | None = None,
    weekly: int | None = None,
    monthly: int | None = None,
    budget: str | int | None = None,
    lag_steps: int | None = None,
    undo_window: str | float | Duration | None = None,
    prune_abandoned: bool = False,
) -> Keep:
    """What to keep: whatever any of these rules keeps.

    The ``last`` n; the ``best`` n by ``metric`` (``mode`` ``min`` or ``max``); one for each multiple of ``every`` steps; those
    ``within`` a time (``"36h"``, ``"7d"``) of the newest; the newest of each of the last n hours, days, weeks or months that have one
    (``hourly`` … ``monthly``, UTC); the newest that fit into ``budget`` (``"500GB"``), with what they need; and always one that is
    ``lag_steps`` the newest by that many steps or more, for damage to the model that is found late.

    ``every`` keeps the checkpoint of exactly that step (step + 1 is the multiple). If that save was postponed, the first one after it
    stays, up to one period late. If a whole period has none, the last one before it stays, less than a period early.

    What goes may be brought back (``relight undelete``) for the time of ``undo_window`` (``"12h"``): it leaves the history at once,
    and its bytes stay so long. They count for no ``budget``.

    Abandoned checkpoints stay, and count for no rule and no budget: those that are no ancestors of the newest good one, because training
    began again from scratch or from an older one. ``prune_abandoned=True`` applies the rules to them as well.

    Without ``metric`` the ``best`` are by the metric of ``save=relight.best(…)``, else by the one that the run records, else by the only
    one that its checkpoints have. Without ``mode`` a well known name decides (``loss``: min, ``accuracy``: max). While no checkpoint has
    the metric, or none is known, the rule keeps all of them.

    Tagged checkpoints, the newest one, and the newest one that verifies always stay. What a roll-back has set aside counts for no rule.
    No clock is asked: times are those of the records, none later than the record behind it.
    """
    counts = {"last": last, "best": best, "every": every, "lag_steps": lag_steps}
    counts |= {"hourly": hourly, "daily": daily, "weekly": weekly, "monthly": monthly}
    if metric is not None:
        mode = mode_for(metric, mode, needed=best is not None)
    return Keep(
        **{name: None if value is None else whole_of(value, name) for name, value in counts.items()},
        metric=metric,
        mode=None if mode is None else one_of(mode, MODES, "mode"),
        within_s=None if within is None else seconds_of(within, "within"),
        budget=None if budget is None else bytes_of(budget, "budget"),
        undo_s=None if undo_window is None else seconds_of(undo_window, "undo_window"),
        prune_abandoned=check_bool(prune_abandoned, "prune_abandoned"),
    )


def decide_keep(rules: Keep, checkpoints: Sequence[Candidate]) -> list[KeepVerdict]:
    """A verdict for each of ``checkpoints``, in their order. Pure; no clock.

    Checkpoints known to be damaged count for no rule, and stay only if tagged, held, or needed by another; so do those behind which
    training went back, if there are others. If no checkpoint that stays is known to verify, nothing goes.
    """
    rules = _with_metric(rules, checkpoints)
    reasons: dict[str, list[str]] = {one.id: [] for one in checkpoints}
    newest_first = sorted(checkpoints, key=lambda one: -one.seq)
    spared = {one.id for one in checkpoints if one.abandoned and not one.aside and not rules.prune_abandoned}
    counted = [one for one in newest_first if not one.aside and one.id not in spared] or newest_first
    sound = [one for one in counted if one.verified is not False]
    for one in counted[:1]:
        reasons[one.id].append("newest")
    newest_verified = next((one for one in counted if one.verified), None)
    if newest_verified:
        reasons[newest_verified.id].append("newest verified")
    ranked = _by_metric(rules, sound, counted)
    for one, reason in (*_by_count(rules, sound), *ranked, *_by_time(rules, sound), *_by_size(rules, sound), *_by_age(rules, sound)):
        reasons[one.id].append(reason)
    for one in checkpoints:
        if one.id in spared:
            reasons[one.id].append("abandoned: training did not continue from it (prune_abandoned removes such checkpoints)")
        if one.tags:
            reasons[one.id].append(f"tagged {', '.join(one.tags)}")
        if one.held:
            reasons[one.id].append(one.held)
        if all(getattr(rules, name) is None for name in RULES):
            reasons[one.id].append("no rule removes anything")
    for one in newest_first:  # who needs another's bytes is newer than it: so what is needed by what is needed stays, too
        users = [user for user in one.needed_by if reasons.get(user)]
        if users:
            reasons[one.id].append(f"its bytes are needed by {', '.join(users)}")
    if not any(one.verified and reasons[one.id] for one in checkpoints):
        return [
            KeepVerdict(one.id, one.step, True, ", ".join(reasons[one.id]) or "nothing that would stay is known to verify")
            for one in checkpoints
        ]
    evicted = _evicted(rules, newest_first, counted, reasons)
    return [
        KeepVerdict(one.id, one.step, False, evicted[one.id])
        if one.id in evicted
        else KeepVerdict(one.id, one.step, bool(reasons[one.id]), ", ".join(reasons[one.id]) or _why_not(rules, one))
        for one in checkpoints
    ]


def _evicted(
    rules: Keep, newest_first: Sequence[Candidate], counted: Sequence[Candidate], reasons: Mapping[str, Sequence[str]]
) -> dict[str, str]:
    """What goes for lack of room, oldest first: what is elsewhere too; then what no further tier will get, as a newer one took its place.

    What a tag, ``every`` or ``best`` names stays, and the newest, and the newest that verifies. Without further tiers nothing is
    ``passed``: no checkpoint goes that is nowhere else.
    """
    staying = [one for one in newest_first if reasons[one.id]]
    over = sum(one.bytes for one in staying) - rules.capacity if rules.capacity is not None else 0
    spared = {one.id for one in (*counted[:1], *[one for one in counted if one.verified][:1])}
    evicted: dict[str, str] = {}
    for one in reversed(staying):
        needed = any(user not in evicted for user in one.needed_by)
        if over > 0 and one.elsewhere and one.id not in spared and not one.tags and not one.held and not needed:
            evicted[one.id] = f"the tier is above its {(rules.capacity or 0) / 1e9:g} GB, and it is on {one.elsewhere}"
            over -= one.bytes
    named = lasting(rules, counted)
    for one in reversed(staying):
        needed = any(user not in evicted for user in one.needed_by)
        may_go = one.passed and one.id not in spared and one.id not in evicted and not one.tags and not one.held
        if over > 0 and may_go and one.id not in named and not needed:
            evicted[one.id] = f"the tier is above its {(rules.capacity or 0) / 1e9:g} GB, and no further tier will get it: newer ones do"
            over -= one.bytes
    return evicted


Kept = Iterator[tuple[Candidate, str]]


def _by_count(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    for position, one in enumerate(sound[: rules.last or 0]):
        yield one, f"last {rules.last}: number {position + 1}"
    kept = milestones(rules.every, sound)
    for one in sound:
        if rules.every and one.id in kept:
            here = "" if kept[one.id] == one.step + 1 else f": after {one.step + 1} steps in place of {kept[one.id]}"
            yield one, f"every {rules.every} steps{here}"


def milestones(every: int | None, among: Sequence[Candidate]) -> dict[str, int]:
    """Map the id of each checkpoint that stands for a multiple of ``every`` steps to that multiple.

    The first checkpoint at or after a multiple stands for it, if it is less than ``every`` steps late. If there is none, and the run is
    past that, the last checkpoint before it does, if it is less than ``every`` steps early. A later checkpoint of a run whose steps only
    grow changes neither: pruning after each save keeps the same checkpoints as one pruning at the end.
    """
    if not every or not among:
        return {}
    done = sorted({one.step + 1 for one in among})
    first: dict[int, int] = {}
    last: dict[int, int] = {}
    for steps in done:
        first.setdefault(steps // every, steps)
        last[steps // every] = steps
    stands = {steps: period * every for period, steps in first.items() if period}
    for period, steps in last.items():
        if period + 1 not in first and period + 1 < done[-1] // every:
            stands.setdefault(steps, (period + 1) * every)
    return {one.id: stands[one.step + 1] for one in among if one.step + 1 in stands}


def _by_metric(rules: Keep, sound: Sequence[Candidate], checkpoints: Sequence[Candidate]) -> Kept:
    """The best ones; all of them while nothing shows which those are: a misspelt metric must not delete what it was meant to keep."""
    why = _unranked(rules, checkpoints) if rules.best else ""
    for position, one in enumerate(sound if why else _best(rules, sound)):
        yield one, f"best {rules.best}: {why}" if why else f"best {rules.best} by {rules.metric} ({rules.mode}): number {position + 1}"


def with_recorded(rules: Keep, recorded: tuple[str, str] | None) -> Keep:
    """``rules`` with the metric that the run records, if they name none, and its mode."""
    if recorded is None or rules.metric not in (None, recorded[0]):
        return rules
    return replace(rules, metric=recorded[0], mode=rules.mode or recorded[1])


def _with_metric(rules: Keep, checkpoints: Sequence[Candidate]) -> Keep:
    """``rules`` with a metric and a mode, if there is only one that can be meant."""
    if rules.metric is not None:
        return rules if rules.mode is not None else replace(rules, mode=mode_of(rules.metric))
    found = only_metric(_finite(checkpoints), rules.mode)
    return rules if found is None else replace(rules, metric=found.metric, mode=found.mode)


def _unranked(rules: Keep, checkpoints: Sequence[Candidate]) -> str:
    """Why settled ``rules`` cannot rank by a metric; empty if they can."""
    finite = _finite(checkpoints)
    if rules.metric is None:
        return f"no metric is named for it, and the checkpoints have {listed(finite)}"
    if rules.metric not in finite:
        return f"no checkpoint has a finite {rules.metric!r} yet (they have {listed(finite)})"
    return "" if rules.mode is not None else f"whether less or more of {rules.metric!r} is better is not known"


def _finite(checkpoints: Sequence[Candidate]) -> set[str]:
    return {name for one in checkpoints for name, value in one.metrics.items() if math.isfinite(value)}


def _by_time(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    """A checkpoint whose time is not known stays by any rule that asks for it."""
    times = times_of(sound)
    newest = next((time_s for time_s in times if time_s is not None), 0.0)
    for one, time_s in zip(sound, times):
        if rules.within_s is not None and (time_s is None or newest - time_s <= rules.within_s):
            yield one, f"within {rules.within_s / 3600:g} h of the newest"
    for name, bucket_of in _BUCKETS.items():
        count, seen = getattr(rules, name), list[float]()
        for one, time_s in zip(sound, times) if count else ():
            bucket = None if time_s is None else bucket_of(time_s)
            if bucket is None:
                yield one, f"{name} {count}: its time is not known"
            elif bucket not in seen and len(seen) < count:
                seen.append(bucket)
                yield one, f"{name} {count}: number {len(seen)}"


def _month(time_s: float) -> float:
    """Months since March of the year 0, by the Gregorian calendar: in years that begin in March every leap day comes last."""
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
    """When each was committed: never later than what came behind it, whatever the clock was."""
    times: list[float | None] = []
    least = math.inf
    for one in newest_first:
        least = least if one.time_s is None else min(least, one.time_s)
        times.append(None if one.time_s is None else least)
    return times


def _by_size(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    total, bytes_of, counted = 0, {one.id: one.bytes for one in sound}, set[str]()
    donors: dict[str, list[str]] = {}
    for one in sound:
        for user in one.needed_by:
            donors.setdefault(user, []).append(one.id)
    for one in sound if rules.budget is not None else ():
        with_it = {one.id, *donors.get(one.id, ())} - counted
        counted |= with_it
        total += sum(bytes_of[each] for each in with_it)
        if total > (rules.budget or 0):
            return
        yield one, f"the newest that fit into {(rules.budget or 0) / 1e9:g} GB"


def _by_age(rules: Keep, sound: Sequence[Candidate]) -> Kept:
    """One that is old enough, and the one that will take its place."""
    if rules.lag_steps is None or not sound:
        return
    limit = sound[0].step - rules.lag_steps
    old = next((one for one in sound if one.step <= limit), None)
    if old is not None:
        yield old, f"{rules.lag_steps} steps behind the newest, or more"
    younger = [one for one in sound if one.step > limit and (old is None or one.seq > old.seq)]
    if younger:
        yield younger[-1], f"the next to be {rules.lag_steps} steps behind the newest"


def lasting(rules: Keep, among: Sequence[Candidate], had: Sequence[Candidate] = ()) -> set[str]:
    """Return the ids of those that ``rules`` name for good, rather than as one of the newest.

    ``had``: checkpoints that are not in ``among``, and that the place with these rules had or has. They decide which one stands for a
    multiple of ``every``.
    """
    counted = [one for one in (*among, *had) if one.verified is not False and not (one.aside or one.abandoned)]
    named = {one.id for one in among if one.tags or (rules.every and (one.step + 1) % rules.every == 0)}
    best = {one.id for one in _best(_with_metric(rules, among), sorted(among, key=lambda other: -other.seq))}
    return named | best | milestones(rules.every, counted).keys()


def _best(rules: Keep, sound: Sequence[Candidate]) -> list[Candidate]:
    if not rules.best or rules.metric is None or rules.mode is None:
        return []
    metric, sign = rules.metric, 1.0 if rules.mode == "min" else -1.0
    scored = [one for one in sound if math.isfinite(one.metrics.get(metric, math.nan))]
    return sorted(scored, key=lambda one: (sign * one.metrics[metric], -one.seq))[: rules.best]


def _why_not(rules: Keep, one: Candidate) -> str:
    if one.verified is False:
        return "damaged, and no tag holds it"
    if one.aside:
        return "training went back behind it, and no tag holds it"
    words = {
        "last": "not among the last {}", "best": "not among the best {}", "every": "not every {}", "within_s": "older than {:g} s",
        "hourly": "not the newest of one of the last {} hours", "daily": "not the newest of one of the last {} days",
        "weekly": "not the newest of one of the last {} weeks", "monthly": "not the newest of one of the last {} months",
        "budget": "beyond {} bytes", "lag_steps": "not the one {} steps behind",
    }  # fmt: skip
    words["best"] = "not among the best {} by {metric}"
    given = {name: value for name in words if (value := getattr(rules, name)) is not None}
    return ", ".join(words[name].format(value, metric=rules.metric) for name, value in given.items())
