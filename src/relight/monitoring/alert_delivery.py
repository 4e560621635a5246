"""Decides which alert messages are sent: groups changes, mutes quiet times, repeats and escalates. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from relight.monitoring.rules import CRITICAL, FIRING, KINDS, RESOLVED, SEVERITIES, Alert, State
from relight.monitoring.settings import Alerting
from relight.observe.masking import mask_text, mask_users
from relight.run_names import run_name

LINES_MAX = 20
TEXT_MAX = 4000
Key = tuple[str, str, str, str]


class Message(NamedTuple):
    """A message to all targets of ``to``; if ``escalated``, to those of ``escalate_to``."""

    title: str
    body: str
    severity: str
    escalated: bool = False
    resolved: bool = False
    """Whether all its alerts are resolved."""


class Unsent(NamedTuple):
    """A message that one target has not taken yet. It is sent again at the next poll."""

    message: Message
    place: int
    """Index of the target in ``to``; in ``escalate_to`` if the message is escalated. An address is secret, so it is not stored."""
    tries: int


class Ledger(NamedTuple):
    """Alerts in messages, alerts that wait for a message, and messages that wait for their target."""

    waiting: Mapping[Key, Alert] = {}
    """The latest state of each alert that was not sent yet."""
    since: float | None = None
    """Since when an alert waits."""
    sent: Mapping[Key, float] = {}
    """When each firing alert was put into a message last."""
    escalated: Mapping[Key, float] = {}
    unsent: Sequence[Unsent] = ()
    """Messages that a target has not taken yet. A later process must send them: their alerts are in ``sent``."""


def plan_messages(
    changes: Sequence[Alert], state: State, ledger: Ledger, settings: Alerting, now: float
) -> tuple[list[Message], Ledger]:
    """Return the messages to send at ``now``, and the next ledger."""
    waiting, sent, escalated = dict(ledger.waiting), dict(ledger.sent), dict(ledger.escalated)
    since = ledger.since
    counts = [alert for alert in changes if SEVERITIES.index(alert.severity) >= SEVERITIES.index(settings.min_severity)]
    repeats = [
        alert
        for key, alert in state.items()
        if alert.state == FIRING and key in sent and settings.repeat_s and now - sent[key] >= settings.repeat_s
    ]
    for alert in [*repeats, *counts]:
        if alert.state == RESOLVED and alert.key in waiting and alert.key not in sent:
            del waiting[alert.key]  # it was resolved before a message was sent
            continue
        waiting[alert.key] = alert
        since = now if since is None else since
    messages: list[Message] = []
    quiet = settings.is_quiet(now)
    ready = [alert for alert in waiting.values() if not quiet or alert.severity == CRITICAL]
    if ready and since is not None and now - since >= settings.group_s:
        messages.append(_message(ready))
        for alert in ready:
            del waiting[alert.key]
            if alert.state == RESOLVED:
                sent.pop(alert.key, None)
            else:
                sent[alert.key] = now
    since = since if waiting else None
    late = [
        alert
        for key, alert in state.items()
        if alert.state == FIRING
        and alert.severity == CRITICAL
        and key not in escalated
        and settings.escalate_to
        and alert.fired_at is not None
        and now - alert.fired_at >= settings.escalate_after_s
    ]
    if late:
        messages.append(_message(late)._replace(escalated=True))
        escalated |= {alert.key: now for alert in late}
    over = [alert for alert in changes if alert.state == RESOLVED and alert.key in escalated]
    if over:
        messages.append(_message(over)._replace(escalated=True))
    firing = {key for key, alert in state.items() if alert.state == FIRING}
    sent = {key: time for key, time in sent.items() if key in firing or key in waiting}
    escalated = {key: time for key, time in escalated.items() if key in firing}
    return messages, Ledger(waiting, since, sent, escalated, ledger.unsent)


def trial_message() -> Message:
    """Return the message of ``relight metrics alerts test``."""
    return Message("Relight: this is a test", "Alerts of Relight arrive here. Nothing is wrong.", "info")


def clean(text: str) -> str:
    """Return ``text`` without possible secrets.

    Secrets are: users and passwords, parameters of URLs, values of keys, tokens and passwords.
    """
    text = re.sub(r"(://[^\s?#]*)[?#][^\s\"'\])]*", r"\1?…", mask_users(text))
    text = mask_text(text)
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)[:TEXT_MAX]


def line_of(alert: Alert) -> str:
    """Return an alert as one line."""
    where = f"{alert.store.rstrip('/')}/{run_name(alert.run)}".rstrip("/")
    word = "over" if alert.state == RESOLVED else alert.severity
    return clean(f"{word}: {KINDS[alert.kind].summary} · {where}: {alert.reason}".replace("\n", " "))[:600]


def _message(alerts: Sequence[Alert]) -> Message:
    firing = [alert for alert in alerts if alert.state == FIRING]
    worst = max((alert.severity for alert in firing or alerts), key=SEVERITIES.index)
    order = sorted(alerts, key=lambda alert: (alert.state == RESOLVED, -SEVERITIES.index(alert.severity), alert.key))
    lines = [line_of(alert) for alert in order[:LINES_MAX]]
    if len(order) > LINES_MAX:
        lines.append(f"… and {len(order) - LINES_MAX} more: relight metrics alerts check shows them")
    runs = sorted({run_name(alert.run) for alert in alerts if alert.run})
    named = ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    first = firing[0] if len(firing) == 1 else None
    summary = KINDS[first.kind].summary if first is not None else f"{len(firing)} alerts" if firing else "over"
    return Message(
        clean(f"Relight, {worst}: {named or 'a store'}: {summary}")[:200],
        "\n".join(lines)[:TEXT_MAX],
        worst,
        resolved=not firing,
    )
