"""Encodes the alerts and the sent messages, so that a restarted process sends no alert twice, and
loses no message. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.decode import from_json_bytes
from relight.monitoring.alert_delivery import Key, Ledger, Unsent
from relight.monitoring.rules import FIRING, KINDS, PENDING, SEVERITIES, Alert, State

BYTES_MAX = 16 << 20
KEPT_MAX = 10_000
"""Most alerts that are kept: firing ones first, then the oldest."""
Timed = tuple[str, str, str, str, float]


class _Kept(msgspec.Struct, frozen=True):
    """The stored state. ``at``: the time of its poll."""

    at: float
    alerts: list[Alert]
    waiting: list[Alert] = []
    waits_since: float | None = None
    told: list[Timed] = []
    escalated: list[Timed] = []
    unsent: list[Unsent] = []


def encode_alarms(state: State, ledger: Ledger, now: float) -> bytes:
    """Encode the alerts and the ledger at ``now``."""
    alerts = sorted(state.values(), key=lambda alert: (alert.state != FIRING, alert.since, alert.key))[:KEPT_MAX]
    waiting = list(ledger.waiting.values())[:KEPT_MAX]
    keys = {alert.key for alert in [*alerts, *waiting]}

    def timed(times: dict[Key, float]) -> list[Timed]:
        return [(*key, time) for key, time in times.items() if key in keys]

    sent, escalated = timed(dict(ledger.sent)), timed(dict(ledger.escalated))
    return msgspec.json.encode(_Kept(now, alerts, waiting, ledger.since, sent, escalated, list(ledger.unsent)))


def decode_alarms(data: bytes, now: float) -> tuple[dict[Key, Alert], Ledger]:
    """Decode the alerts and the ledger for a poll at ``now``; both empty if the data is empty or invalid.

    A firing alert keeps its times. For a pending one, the time without polls does not count.
    """
    try:
        if len(data) > BYTES_MAX:
            return {}, Ledger()
        stored = from_json_bytes(data, _Kept)
    except msgspec.MsgspecError:
        return {}, Ledger()
    if not stored.at <= now:  # the clock was set back: times in the future cannot be used
        return {}, Ledger()
    away_s = now - stored.at
    alerts = [
        alert._replace(since=alert.since + away_s) if alert.state == PENDING else alert
        for alert in stored.alerts
        if _is_one(alert)
    ]
    state = {alert.key: alert for alert in alerts}
    waiting = {alert.key: alert for alert in stored.waiting if _is_one(alert)}
    since = stored.waits_since if waiting else None
    known = {**waiting, **state}
    unsent = tuple(entry for entry in stored.unsent if entry.place >= 0 and entry.tries >= 0)
    return state, Ledger(waiting, since, _by_key(stored.told, known), _by_key(stored.escalated, known), unsent)


def _by_key(times: Sequence[Timed], known: State) -> dict[Key, float]:
    return {entry[:4]: entry[4] for entry in times if entry[:4] in known}


def _is_one(alert: Alert) -> bool:
    """Return whether an alert's kind exists: another version may have stored it."""
    return alert.kind in KINDS and alert.severity in SEVERITIES
