"""Checks which alert rules hold for a run now.

Pure: the input is the runs' states, a time and the earlier alerts; the output is changes with reasons.

A rule that begins to hold is *pending*. After it has held for ``for_s`` it *fires*. When it no longer holds it is
*resolved*. Each kind has one line in ``KINDS``, with its setting, its check of a run and the equivalent Prometheus rule.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, NamedTuple

from relight.monitoring.overview import ROLLED_BACK_WORDS, RunSeen
from relight.run_names import run_name
from relight.settings.alert_settings import RuleSettings, default_rule
from relight.settings.kinds import Severity, choices
from relight.units import age_text, duration_text, percent_text, size_text

INFO, WARNING, CRITICAL = "info", "warning", "critical"
SEVERITIES = choices(Severity)
PENDING, FIRING, RESOLVED = "pending", "firing", "resolved"
Found = Iterator[tuple[str, str]]
"""For each object that a rule holds for: its name within the run, such as a tier's, and the reason."""


class RuleKind(NamedTuple):
    """A kind of rule. ``of`` yields what exceeds its limit."""

    summary: str
    of: Callable[[RunSeen, float, float], Found]
    expr: str
    """Equivalent expression for Prometheus, with ``LIMIT`` in place of the number."""
    hint: str
    """The command to begin with, with ``RUN`` in place of the run."""
    usual: RuleSettings
    """The default rule."""

    @property
    def limit(self) -> str:
        """Return the name of the setting of its limit, if it has one."""
        return self.usual.limit[0]


class AlertRule(NamedTuple):
    """A rule as configured."""

    kind: str
    limit: float
    severity: str
    for_s: float = 0.0
    runs: tuple[str, ...] = ("*",)
    """Patterns of the names of the runs that it covers."""

    @classmethod
    def from_settings(cls, kind: str, rule: RuleSettings) -> AlertRule:
        """Return the rule with a table's settings."""
        return cls(kind, rule.limit[1], rule.severity, rule.for_s, rule.runs)


class Alert(NamedTuple):
    """A rule that holds for a run or for an object in it. Times are seconds since the epoch."""

    kind: str
    severity: str
    store: str
    run: str
    about: str
    """The object within the run, such as a tier's name; usually empty."""
    state: str
    reason: str
    since: float
    fired_at: float | None = None
    resolved_at: float | None = None

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the key that identifies an alert from poll to poll."""
        return self.store, self.run, self.kind, self.about


State = Mapping[tuple[str, str, str, str], Alert]
"""Pending and firing alerts, by key."""


class AlertChanges(NamedTuple):
    """The present alerts, and those that began to fire or were resolved since the last poll."""

    state: dict[tuple[str, str, str, str], Alert]
    changes: tuple[Alert, ...]


def judge(rules: Sequence[AlertRule], runs: Iterable[RunSeen], now: float, state: State) -> AlertChanges:
    """Return the alerts at ``now``, and the changes.

    A run that could not be read keeps its alerts, except the one that reports exactly that. A deleted run has no
    alerts.
    """
    holding: dict[tuple[str, str, str, str], Alert] = {}
    changes: list[Alert] = []
    runs = list(runs)
    away = {seen.store for seen in runs if seen.error and not seen.run}
    """Stores that do not answer, so that their runs are unknown."""
    for seen in runs:
        unknown = bool(seen.error)
        for rule in rules:
            if not any(fnmatchcase(run_name(seen.run), pattern) for pattern in rule.runs):
                continue
            if unknown and rule.kind != UNREADABLE:
                unchanged = [alert for key, alert in state.items() if key[:3] == (seen.store, seen.run, rule.kind)]
                holding |= {alert.key: alert for alert in unchanged}
                continue
            for about, reason in KINDS[rule.kind].of(seen, rule.limit, now):
                alert = _holds(rule, seen, about, reason, now, state)
                holding[alert.key] = alert
                before = state.get(alert.key)
                if alert.state == FIRING and (before is None or before.state != FIRING):
                    changes.append(alert)
    for key, alert in state.items():
        if key[0] in away:
            holding[key] = alert
        elif key not in holding and alert.state == FIRING:
            changes.append(alert._replace(state=RESOLVED, resolved_at=now))
    return AlertChanges(holding, tuple(changes))


def _holds(rule: AlertRule, seen: RunSeen, about: str, reason: str, now: float, state: State) -> Alert:
    before = state.get((seen.store, seen.run, rule.kind, about))
    since = before.since if before is not None else now
    fires = now - since >= rule.for_s
    fired_at = (before.fired_at if before is not None else None) or now if fires else None
    return Alert(
        rule.kind, rule.severity, seen.store, seen.run, about, FIRING if fires else PENDING, reason, since, fired_at
    )


# -- the kinds


def _no_good(seen: RunSeen, limit: float, now: float) -> Found:
    if not seen.active or seen.unprotected_s is None or seen.unprotected_s <= limit:
        return
    if seen.good_step is None:
        yield "", f"no good checkpoint since the run began, {age_text(seen.unprotected_s)}"
        return
    newer = f"; newer ones are not good: {seen.bad[-1][1]}" if seen.bad and seen.step != seen.good_step else ""
    yield "", f"the newest good checkpoint is step {seen.good_step}, {duration_text(seen.unprotected_s)} old{newer}"


def _slow(seen: RunSeen, limit: float, now: float) -> Found:
    seconds = seen.saving.last_s
    if seen.active and seconds is not None and seconds > limit:
        step = seen.saving.last[-1].step if seen.saving.last else None
        yield (
            "",
            f"the save of step {step} took {duration_text(seconds)} until it was durable, more than {duration_text(limit)}",
        )


def _failing(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.active and seen.saving.failed_in_a_row >= limit:
        yield "", f"{seen.saving.failed_in_a_row} saves in a row have failed"


def _full(seen: RunSeen, limit: float, now: float) -> Found:
    for tier in seen.tiers:
        if tier.full is not None and tier.full > limit:
            of = f"{size_text(tier.used_bytes)} of {size_text(tier.capacity_bytes or 0)}"
            yield tier.name, f"tier {tier.name} is {percent_text(tier.full)} full: {of}"


def _lagging(seen: RunSeen, limit: float, now: float) -> Found:
    for tier in seen.tiers:
        if seen.active and tier.lag_s > limit:
            yield (
                tier.name,
                f"tier {tier.name} lacks {tier.lag} checkpoints, the oldest {duration_text(tier.lag_s)} old",
            )


def _damaged(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.damaged > limit:
        id_, why = next(((id_, why) for id_, why in reversed(seen.bad) if why != ROLLED_BACK_WORDS), ("", ""))
        yield (
            "",
            f"checkpoint {id_} does not count as good: {why}"
            if id_
            else f"{seen.damaged} checkpoints do not count as good",
        )


def _risky(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.risk > limit:
        yield "", f"risk {seen.risk:.2f}: {seen.risk_why or 'a failure is predicted'}"


def _loops(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.recent_failures >= limit:
        last = f"; the last: {seen.incidents[-1].kind}: {seen.incidents[-1].why}" if seen.incidents else ""
        yield "", f"{seen.recent_failures} failures within an hour{last}"


def _given_up(seen: RunSeen, limit: float, now: float) -> Found:
    if bool(seen.outcomes.given_up) >= limit:
        ago = (
            age_text(max(0.0, now - seen.outcomes.decided_at))
            if seen.outcomes.decided_at is not None
            else "at an unknown time"
        )
        yield "", f"relight run stopped the job {ago}, and no attempt has begun since: {seen.outcomes.given_up}"


def _excluded(seen: RunSeen, limit: float, now: float) -> Found:
    if (count := len(seen.outcomes.excluded)) >= limit:
        nodes = "1 node has" if count == 1 else f"{count} nodes have"
        yield "", f"{nodes} left the job within a day; the last: {seen.outcomes.excluded[-1]}"


def _went_back(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.outcomes.roll_backs >= limit:
        times = "once" if seen.outcomes.roll_backs == 1 else f"{seen.outcomes.roll_backs} times"
        why = f": {seen.outcomes.roll_back_why}" if seen.outcomes.roll_back_why else ""
        yield "", f"the run was rolled back {times} within a day{why}"


def _hardware(seen: RunSeen, limit: float, now: float) -> Found:
    if (count := seen.outcomes.hardware) >= limit:
        failures = "1 hardware failure" if count == 1 else f"{count} hardware failures"
        yield "", f"{failures} within a day; the last: {seen.outcomes.hardware_why}"


def _blocked(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.active and seen.retention_failed >= limit:
        yield "", seen.retention_why or "old checkpoints could not be removed"


def _degraded(seen: RunSeen, limit: float, now: float) -> Found:
    if len(seen.drives or ()) >= limit:
        for path, why in seen.drives or ():
            yield path, f"drive {path} of the mirrored store is {why}; what is saved has one copy"


def _unreadable(seen: RunSeen, limit: float, now: float) -> Found:
    if seen.error:
        yield "", f"it cannot be read: {seen.error.splitlines()[0]}"


NO_GOOD, UNREADABLE = "no_good_checkpoint", "unreadable"
_KINDS: dict[str, tuple[str, Callable[[RunSeen, float, float], Found], str, str]] = {
    NO_GOOD: (
        "no good checkpoint for too long", _no_good,
        "relight_checkpoint_good_age_seconds > LIMIT and relight_run_active == 1", "relight doctor RUN",
    ),
    "saves_failing": (
        "saves fail in a row", _failing, "relight_saves_failed_in_a_row >= LIMIT and relight_run_active == 1", "relight doctor RUN",
    ),
    "slow_save": (
        "a save took too long", _slow, "relight_save_last_seconds > LIMIT and relight_run_active == 1", "relight show RUN --trace",
    ),
    "tier_full": ("a tier is nearly full", _full, "relight_tier_full_ratio > LIMIT", "relight ls RUN --tiers"),
    "tier_behind": (
        "a further tier lacks new checkpoints", _lagging,
        "relight_tier_lag_seconds > LIMIT and on (store, run) relight_run_active == 1", "relight ls RUN --tiers",
    ),
    "damaged": ("a checkpoint is damaged", _damaged, "relight_checkpoints_damaged > LIMIT", "relight verify RUN"),
    "risk": ("a failure is predicted", _risky, "relight_risk_ratio > LIMIT", "relight top RUN"),
    "job_given_up": ("relight run stopped the job", _given_up, "relight_job_given_up >= LIMIT", "relight incidents RUN latest"),
    "node_excluded": ("a node has left the job", _excluded, "relight_nodes_excluded >= LIMIT", "relight incidents RUN"),
    "rolled_back": ("the run was rolled back", _went_back, "relight_recent_roll_backs >= LIMIT", "relight incidents RUN"),
    "hardware_failure": ("hardware has failed", _hardware, "relight_recent_hardware_failures >= LIMIT", "relight incidents RUN latest"),
    "crash_loop": ("failures within an hour", _loops, "relight_recent_failures >= LIMIT", "relight incidents RUN"),
    "drive_degraded": (
        "a drive of a mirrored store failed", _degraded, "relight_mirror_drives_degraded >= LIMIT", "relight verify RUN --repair",
    ),
    "retention_blocked": (
        "old checkpoints cannot be removed", _blocked,
        "relight_retention_failed >= LIMIT and relight_run_active == 1", "relight doctor RUN",
    ),
    UNREADABLE: ("the run cannot be read", _unreadable, "relight_store_up == LIMIT", "relight doctor RUN"),
}  # fmt: skip
KINDS = {name: RuleKind(*row, default_rule(name)) for name, row in _KINDS.items()}
"""Every kind of alert."""


def usual_rules() -> tuple[AlertRule, ...]:
    """Return the default rule of each kind."""
    return tuple(AlertRule.from_settings(name, kind.usual) for name, kind in KINDS.items())


def alert_name(kind: str) -> str:
    """Return the name of a kind of alert in Prometheus: ``RelightNoGoodCheckpoint`` for ``no_good_checkpoint``."""
    return "Relight" + "".join(part.capitalize() for part in kind.split("_"))


def hint_of(kind: str, store: str, run: str) -> str:
    """Return the command to begin with for an alert of a run, or of the whole store if ``run`` is empty. A shell takes it unchanged."""
    place = f"{store.rstrip('/')}/{run_name(run)}".rstrip("/")
    return KINDS[kind].hint.replace("RUN", shlex.quote(place))


def as_dict(alert: Alert) -> dict[str, Any]:
    """Return an alert for JSON."""
    return {**alert._asdict(), "says": KINDS[alert.kind].summary}
