"""Posts alerts to Prometheus' Alertmanager by its API of version 2. It groups, mutes, repeats and routes them itself.

A firing alert is posted each minute, with an end four minutes ahead: it ends at the Alertmanager even if Relight is
killed. An alert that is over is posted with its end until the Alertmanager has taken it. A repeated post changes
nothing there, so a restarted process posts all firing alerts again.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, NamedTuple
from urllib.parse import parse_qsl, urlsplit, urlunsplit

import msgspec

from relight.errors import ConfigError, RelightError
from relight.http_request import request, without_user
from relight.monitoring.alert_delivery import Key, Message, clean
from relight.monitoring.rules import FIRING, KINDS, RESOLVED, Alert, alert_name, hint_of
from relight.monitoring.settings import AlertTarget
from relight.run_names import run_name

SCHEMES = {"alertmanager": ("http", 9093), "alertmanagers": ("https", 443)}
"""For each scheme of an address: the scheme of its requests, and the port unless the address has one."""
REPEAT_S = 60.0
ENDS_AFTER_S = 4 * REPEAT_S
KEPT_S = 900.0
"""Seconds for which the end of an alert is posted again if it is not taken."""
TIMEOUT_S = 5.0
_TRIAL_S = 60.0
_BYTES_MAX = 64 << 10
_PATH = "/api/v2/alerts"


class Receiver(NamedTuple):
    """An Alertmanager: the URL that alerts are posted to, and headers with secrets."""

    url: str
    headers: dict[str, str]


def receiver_of(target: AlertTarget) -> Receiver | None:
    """Return the Alertmanager of an address; None if it is an address of another kind.

    The form is ``alertmanager://USER:PASSWORD@HOST:PORT/PREFIX?+HEADER=VALUE``, with ``alertmanagers`` for TLS. Raise
    ``ConfigError`` without the secret if it is invalid.
    """
    address = target.address()
    scheme, separator, rest = address.partition("://")
    if not separator or scheme.lower() not in SCHEMES:
        return None
    http, port = SCHEMES[scheme.lower()]
    try:
        url, headers = without_user(f"{http}://{rest}")
        parts = urlsplit(url)
        given = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
        # parse_qsl reads the + that marks a header as a space
        more = {name[1:].strip(): value for name, value in given.items() if name[:1] in "+ " and name[1:].strip()}
        if len(more) < len(given) or any(not text.isprintable() for pair in more.items() for text in pair):
            raise ValueError
    except (ConfigError, ValueError):
        hint = "alertmanager://HOST:9093, alertmanagers://USER:PASSWORD@HOST, alertmanagers://HOST?+Authorization=Bearer%20TOKEN"
        raise ConfigError("that is not the address of an Alertmanager", where=target.shown, hint=hint) from None
    place = parts.netloc if parts.port else f"{parts.netloc.removesuffix(':')}:{port}"
    path = parts.path.rstrip("/").removesuffix(_PATH) + _PATH
    return Receiver(urlunsplit((http, place, path, "", "")), {**headers, **more})


def is_alertmanager(target: AlertTarget) -> bool:
    """Return whether an address is an Alertmanager's. One that cannot be read is not."""
    try:
        return receiver_of(target) is not None
    except ConfigError:
        return False


def as_posted(alert: Alert, now: float, dashboard: str = "") -> dict[str, Any]:
    """Return an alert as the Alertmanager's API takes it. Its name and labels are those of the rules for Prometheus."""
    kind = KINDS[alert.kind]
    store, run = clean(alert.store), run_name(alert.run)
    where = f"{store.rstrip('/')}/{run}".rstrip("/")
    about = f" ({alert.about})" if alert.about else ""
    labels = {
        "alertname": alert_name(alert.kind), "severity": alert.severity, "store": store, "run": run, "tier": alert.about,
    }  # fmt: skip
    ends = alert.resolved_at if alert.state == RESOLVED and alert.resolved_at is not None else now + ENDS_AFTER_S
    return {
        "labels": {name: text for name, text in labels.items() if text},
        "annotations": {
            "summary": f"{where}{about}: {kind.summary}",
            "description": clean(alert.reason),
            "hint": hint_of(alert.kind, store, alert.run),
        },
        "startsAt": _stamp(alert.fired_at or alert.since),
        "endsAt": _stamp(ends),
        **({"generatorURL": dashboard} if dashboard else {}),
    }


def post(receiver: Receiver, alerts: Sequence[dict[str, Any]]) -> None:
    """Post alerts. Raise ``StoreUnavailable`` if the Alertmanager does not take them."""
    headers = {"Content-Type": "application/json", **receiver.headers}
    request(
        receiver.url, headers=headers, data=msgspec.json.encode(alerts), timeout_s=TIMEOUT_S, bytes_max=_BYTES_MAX,
        what="the Alertmanager",
    )  # fmt: skip


def post_message(receiver: Receiver, message: Message, now: float) -> None:
    """Post a message that belongs to no alert, such as a test's, as an alert of one minute."""
    post(
        receiver,
        [
            {
                "labels": {"alertname": "RelightTest", "severity": message.severity},
                "annotations": {"summary": message.title, "description": message.body},
                "startsAt": _stamp(now),
                "endsAt": _stamp(now + _TRIAL_S),
            }
        ],
    )


class AlertmanagerFeed:
    """The alerts that one Alertmanager has. Used by one thread at a time."""

    def __init__(self, target: AlertTarget, *, escalated: bool = False, dashboard: str = "") -> None:
        """``escalated``: whether it gets only alerts that were escalated."""
        self.target, self.escalated, self._dashboard = target, escalated, dashboard
        self.failed = 0
        """Failed posts in a row."""
        self._posted: dict[Key, float] = {}
        """When each firing alert was taken last."""
        self._over: dict[Key, Alert] = {}
        """Alerts that are over. The Alertmanager has not taken their end yet."""

    def due(self, firing: Iterable[Alert], changes: Iterable[Alert], now: float) -> list[Alert]:
        """Return the alerts to post now: new ones, ones that were not posted for a minute, and ones that are over."""
        current = {alert.key: alert for alert in firing}
        self._over |= {alert.key: alert for alert in changes if alert.state == RESOLVED and alert.key in self._posted}
        self._over = {
            key: alert
            for key, alert in self._over.items()
            if key not in current and now - (alert.resolved_at or now) <= KEPT_S
        }
        self._posted = {key: time for key, time in self._posted.items() if key in current or key in self._over}
        repeated = [alert for key, alert in current.items() if now - self._posted.get(key, -REPEAT_S) >= REPEAT_S]
        return [*repeated, *self._over.values()]

    def update(self, firing: Iterable[Alert], changes: Iterable[Alert], now: float) -> str:
        """Post what is due, and return why it was not taken; empty if it was."""
        alerts = self.due(firing, changes, now)
        if not alerts:
            return ""
        try:
            receiver = receiver_of(self.target)
            if receiver is None:
                raise ConfigError("the address is no longer an Alertmanager's")
            post(receiver, [as_posted(alert, now, self._dashboard) for alert in alerts])
        except RelightError as error:
            self.failed += 1
            return error.what
        self.failed = 0
        for alert in alerts:
            if alert.state == FIRING:
                self._posted[alert.key] = now
            else:
                del self._over[alert.key], self._posted[alert.key]
        return ""


def _stamp(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
