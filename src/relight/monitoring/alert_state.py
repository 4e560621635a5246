"""What alerts there are and what was told of them, as bytes: for whoever looks next, so that a restart tells nothing twice. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from relight.decode import from_json_bytes
from relight.monitoring.alert_delivery import Key, Ledger
from relight.monitoring.rules import FIRING, KINDS, PENDING, SEVERITIES, Alert, State

BYTES_MAX = 16 << 20
KEPT_MAX = 10_000
"""Alerts that are kept; of more, those that have held for longest."""
Timed = tuple[str, str, str, str, float]


class _Kept(msgspec.Struct, frozen=True):
    """All of it. ``at``: the time of the look that it is of."""

    at: float
    alerts: list[Alert]
    waiting: list[Alert] = []
    waits_since: float | None = None
    told: list[Timed] = []
    escalated: list[Timed] = []


def encode_alarms(state: State, ledger: Ledger, now: float) -> bytes:
    """What holds, and what was told of it, at ``now``."""
    alerts = sorted(state.values(), key=lambda one: (one.state != FIRING, one.since, one.key))[:KEPT_MAX]
    waiting = list(ledger.waiting.values())[:KEPT_MAX]
    keys = {one.key for one in [*alerts, *waiting]}

    def timed(told: dict[Key, float]) -> list[Timed]:
        return [(*key, at) for key, at in told.items() if key in keys]

    kept = _Kept(now, alerts, waiting, ledger.since, timed(dict(ledger.told)), timed(dict(ledger.escalated)))
    return msgspec.json.encode(kept)


def decode_alarms(data: bytes, now: float) -> tuple[dict[Key, Alert], Ledger]:
    """The same for a look at ``now``; nothing if nothing was kept, or what was makes no sense.

    An alert that fired does so since when it did. One that was pending is not older for the time in which nobody looked.
    """
    try:
        if len(data) > BYTES_MAX:
            return {}, Ledger()
        kept = from_json_bytes(data, _Kept)
    except msgspec.MsgspecError:
        return {}, Ledger()
    if not kept.at <= now:  # a clock that was set back: what is from the future is nothing to reckon with
        return {}, Ledger()
    away_s = now - kept.at
    alerts = [one._replace(since=one.since + away_s) if one.state == PENDING else one for one in kept.alerts if _is_one(one)]
    state = {one.key: one for one in alerts}
    waiting = {one.key: one for one in kept.waiting if _is_one(one)}
    since = kept.waits_since if waiting else None
    known = {**waiting, **state}
    return state, Ledger(waiting, since, _by_key(kept.told, known), _by_key(kept.escalated, known))


def _by_key(told: Sequence[Timed], known: State) -> dict[Key, float]:
    return {one[:4]: one[4] for one in told if one[:4] in known}


def _is_one(alert: Alert) -> bool:
    """Whether it is of a kind that there is: another version may have kept it."""
    return alert.kind in KINDS and alert.severity in SEVERITIES
