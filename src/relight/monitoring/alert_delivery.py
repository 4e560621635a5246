"""Which messages go out: what changed, put together; held back in quiet times; told again; told to others when nobody acts. Pure."""

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
    """One, to all of ``to``, or, ``escalated``, to those whom things are escalated to."""

    title: str
    body: str
    severity: str
    escalated: bool = False
    resolved: bool = False
    """Whether all that it tells of is over."""


class Ledger(NamedTuple):
    """What was told, and what is to be."""

    waiting: Mapping[Key, Alert] = {}
    """The latest of each, not told yet."""
    since: float | None = None
    """Since when something waits."""
    told: Mapping[Key, float] = {}
    """When what fires was told last."""
    escalated: Mapping[Key, float] = {}


def plan_messages(changes: Sequence[Alert], state: State, ledger: Ledger, settings: Alerting, now: float) -> tuple[list[Message], Ledger]:
    """The messages to be sent at ``now``, and what is to be remembered."""
    waiting, told, escalated = dict(ledger.waiting), dict(ledger.told), dict(ledger.escalated)
    since = ledger.since
    counts = [one for one in changes if SEVERITIES.index(one.severity) >= SEVERITIES.index(settings.min_severity)]
    repeats = [
        one for key, one in state.items()
        if one.state == FIRING and key in told and settings.repeat_s and now - told[key] >= settings.repeat_s
    ]  # fmt: skip
    for one in [*repeats, *counts]:
        if one.state == RESOLVED and one.key in waiting and one.key not in told:
            del waiting[one.key]  # it came and went before anybody heard of it
            continue
        waiting[one.key] = one
        since = now if since is None else since
    messages: list[Message] = []
    quiet = settings.is_quiet(now)
    ready = [one for one in waiting.values() if not quiet or one.severity == CRITICAL]
    if ready and since is not None and now - since >= settings.group_s:
        messages.append(_message(ready))
        for one in ready:
            del waiting[one.key]
            if one.state == RESOLVED:
                told.pop(one.key, None)
            else:
                told[one.key] = now
    since = since if waiting else None
    late = [
        one for key, one in state.items()
        if one.state == FIRING and one.severity == CRITICAL and key not in escalated and settings.escalate_to
        and one.fired_at is not None and now - one.fired_at >= settings.escalate_after_s
    ]  # fmt: skip
    if late:
        messages.append(_message(late)._replace(escalated=True))
        escalated |= {one.key: now for one in late}
    over = [one for one in changes if one.state == RESOLVED and one.key in escalated]
    if over:
        messages.append(_message(over)._replace(escalated=True))
    firing = {key for key, one in state.items() if one.state == FIRING}
    told = {key: at for key, at in told.items() if key in firing or key in waiting}
    return messages, Ledger(waiting, since, told, {key: at for key, at in escalated.items() if key in firing})


def trial_message() -> Message:
    """What ``relight alerts test`` sends."""
    return Message("Relight: this is a test", "Alerts of Relight arrive here. Nothing is wrong.", "info")


def clean(text: str) -> str:
    """``text`` without what may be secret: users and passwords, parameters of URLs, values of what is called key, token or password."""
    text = re.sub(r"(://[^\s?#]*)[?#][^\s\"'\])]*", r"\1?…", mask_users(text))
    text = mask_text(text)
    return "".join(char if char.isprintable() or char == "\n" else "�" for char in text)[:TEXT_MAX]


def line_of(one: Alert) -> str:
    """An alert in one line."""
    where = f"{one.store.rstrip('/')}/{run_name(one.run)}".rstrip("/")
    word = "over" if one.state == RESOLVED else one.severity
    return clean(f"{word}: {KINDS[one.kind].says} · {where}: {one.reason}".replace("\n", " "))[:600]


def _message(alerts: Sequence[Alert]) -> Message:
    firing = [one for one in alerts if one.state == FIRING]
    worst = max((one.severity for one in firing or alerts), key=SEVERITIES.index)
    order = sorted(alerts, key=lambda one: (one.state == RESOLVED, -SEVERITIES.index(one.severity), one.key))
    lines = [line_of(one) for one in order[:LINES_MAX]]
    if len(order) > LINES_MAX:
        lines.append(f"… and {len(order) - LINES_MAX} more: relight alerts check shows them")
    runs = sorted({run_name(one.run) for one in alerts if one.run})
    named = ", ".join(runs[:3]) + (f" and {len(runs) - 3} more" if len(runs) > 3 else "")
    first = firing[0] if len(firing) == 1 else None
    what = KINDS[first.kind].says if first is not None else f"{len(firing)} alerts" if firing else "over"
    return Message(clean(f"Relight, {worst}: {named or 'a store'}: {what}")[:200], "\n".join(lines)[:TEXT_MAX], worst, resolved=not firing)
