"""Sends alerts: to Alertmanagers by their API, and through apprise to Slack, e-mail, PagerDuty, webhooks and a hundred more.

Addresses never reach logs or texts.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from relight.errors import ConfigError, RelightError, extra_hint
from relight.monitoring.alert_delivery import Ledger, Message, Unsent, clean, line_of, plan_messages
from relight.monitoring.alertmanager import AlertmanagerFeed, is_alertmanager, post_message, receiver_of
from relight.monitoring.hushed import hushed
from relight.monitoring.overview import RunSeen
from relight.monitoring.rules import FIRING, SEVERITIES, Alert, AlertChanges, State, judge
from relight.monitoring.settings import Alerting, AlertTarget
from relight.observe import emit
from relight.run_names import run_name

TRIES = 5
"""Tries for each message, one at each poll, before it is discarded."""
UNSENT_MAX = 100
_LIBRARIES = ("apprise", "urllib3", "requests")


class Sent(NamedTuple):
    """Result of sending a message to one target."""

    target: str
    ok: bool
    why: str = ""


def check_targets(targets: Sequence[AlertTarget]) -> None:
    """Raise ``ConfigError`` for the first address that is neither an Alertmanager's nor known to apprise.

    Without apprise the error names the extra to install.
    """
    for target in targets:
        if receiver_of(target) is None:
            _notifier(target)


def send(message: Message, targets: Sequence[AlertTarget]) -> list[Sent]:
    """Send a message to each target, one after the other. Each has some seconds. A failed target raises no error."""
    results = []
    for target in targets:
        try:
            receiver = receiver_of(target)
            if receiver is not None:
                post_message(receiver, message, time.time())
                results.append(Sent(target.shown, True))
                continue
            notifier = _notifier(target)
            with hushed(*_LIBRARIES):
                ok = bool(
                    notifier.notify(
                        body=message.body, title=message.title, notify_type=_kind(message), interpret_escapes=False
                    )
                )
            results.append(Sent(target.shown, ok, "" if ok else "it was refused, or the target did not answer"))
        except RelightError as error:
            results.append(Sent(target.shown, False, error.what))
        except Exception as error:  # noqa: BLE001 (a plug-in's error; reported without its text, which may contain the address)
            results.append(Sent(target.shown, False, type(error).__name__))
    return results


class Alarms:
    """Judges the runs at each poll, and sends what changed. One thread calls ``update``; any may read ``alerts``."""

    def __init__(
        self,
        settings: Alerting,
        state: State | None = None,
        ledger: Ledger | None = None,
        keeps: Callable[[State, Ledger, float], None] = lambda state, ledger, now: None,
    ) -> None:
        """``keeps`` is called after each poll with the state for a later process. If it fails, alerts are sent anyway."""
        self._settings, self._keeps = settings, keeps
        self.state: dict[tuple[str, str, str, str], Alert] = dict(state or {})
        """Pending and firing alerts. Pass them to the next ``Alarms``, so that it does not send them again."""
        self.ledger = ledger or Ledger()
        self._feeds = [
            AlertmanagerFeed(target, escalated=escalated, dashboard=settings.dashboard)
            for targets, escalated in ((settings.to, False), (settings.escalate_to, True))
            for target in targets
            if is_alertmanager(target)
        ]
        self._lock = threading.Lock()

    @property
    def alerts(self) -> list[Alert]:
        """Return the pending and firing alerts: firing ones first, then the oldest."""
        with self._lock:
            return sorted(self.state.values(), key=lambda alert: (alert.state != FIRING, alert.since, alert.key))

    def update(self, runs: Sequence[RunSeen], now: float) -> AlertChanges:
        """Judge these runs, and send what changed. Blocks until the targets have answered."""
        with self._lock:
            judged = judge(self._settings.rules, runs, now, self.state)
            self.state = judged.state
            messages, self.ledger = plan_messages(judged.changes, judged.state, self.ledger, self._settings, now)
        for alert in judged.changes:
            fields = {
                "kind": alert.kind,
                "severity": alert.severity,
                "store": clean(alert.store),
                "run": run_name(alert.run),
            }
            emit(
                "alert.fired" if alert.state == FIRING else "alert.resolved",
                line_of(alert),
                **fields,
                about=alert.about,
            )
        self._deliver(messages)
        self._feed(judged, now)
        with contextlib.suppress(RelightError):
            self._keeps(self.state, self.ledger, now)
        return judged

    def _feed(self, judged: AlertChanges, now: float) -> None:
        """Post to the Alertmanagers what is due. They group, mute and repeat: only the least severity is checked here."""
        least = SEVERITIES.index(self._settings.min_severity)
        firing = [
            alert
            for alert in judged.state.values()
            if alert.state == FIRING and SEVERITIES.index(alert.severity) >= least
        ]
        for feed in self._feeds:
            alerts = [alert for alert in firing if not feed.escalated or alert.key in self.ledger.escalated]
            why = feed.update(alerts, judged.changes, now)
            if why and feed.failed == TRIES:
                emit(
                    "alert.unsent",
                    f"{feed.target.shown} does not get alerts: {why}; they are posted again at each poll",
                    target=feed.target.shown,
                    why=why,
                )

    def _deliver(self, messages: Sequence[Message]) -> None:
        """Send the messages and those that failed before. The ledger keeps what a target has not taken, for a later process, too."""
        fed = {id(feed.target) for feed in self._feeds}
        new = [Unsent(message, place, 0) for message in messages for place in range(len(self._targets(message)))]
        retried = []
        for unsent in [*self.ledger.unsent, *new]:
            targets = self._targets(unsent.message)
            if unsent.place >= len(targets):  # the settings of an earlier process had a target there
                emit(
                    "alert.unsent",
                    f"{unsent.message.title!r} was not delivered: its target is no longer in the settings",
                    target="",
                    why="the settings name fewer targets",
                )
                continue
            if id(targets[unsent.place]) in fed:
                continue
            (sent,) = send(unsent.message, [targets[unsent.place]])
            if sent.ok:
                continue
            if unsent.tries + 1 < TRIES:
                retried.append(unsent._replace(tries=unsent.tries + 1))
            else:
                emit(
                    "alert.unsent",
                    f"{sent.target} did not get {unsent.message.title!r}: {sent.why}",
                    target=sent.target,
                    why=sent.why,
                )
        self.ledger = self.ledger._replace(unsent=tuple(retried[-UNSENT_MAX:]))

    def _targets(self, message: Message) -> tuple[AlertTarget, ...]:
        return self._settings.escalate_to if message.escalated else self._settings.to


def _notifier(target: AlertTarget):  # type: ignore[no-untyped-def] # apprise's own
    try:
        import apprise
    except ModuleNotFoundError:
        raise ConfigError("alerts need apprise", hint=extra_hint("alerts")) from None
    notifier = apprise.Apprise()
    with hushed(*_LIBRARIES):
        is_known = notifier.add(target.address())
    if not is_known:
        raise ConfigError(
            "that is not an address for alerts",
            where=target.shown,
            hint="such as mailtos://USER:PASSWORD@HOST?to=ADDRESS or slack://TOKEN/CHANNEL: docs/monitoring.md",
        )
    return notifier


def _kind(message: Message) -> str:
    if message.resolved:
        return "success"
    return {"critical": "failure", "warning": "warning"}.get(message.severity, "info")
