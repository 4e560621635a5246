"""Sends alerts through apprise: Slack, e-mail, PagerDuty, webhooks and a hundred more.

Addresses never reach logs or texts.
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from relight.errors import ConfigError, RelightError
from relight.monitoring.alert_delivery import Ledger, Message, clean, line_of, plan_messages
from relight.monitoring.overview import RunSeen
from relight.monitoring.rules import FIRING, Alert, AlertChanges, State, judge
from relight.monitoring.settings import Alerting, AlertTarget
from relight.observe import emit
from relight.run_names import run_name

TRIES = 5
"""Tries for each message, one at each poll, before it is discarded."""
UNSENT_MAX = 100


class Sent(NamedTuple):
    """Result of sending a message to one target."""

    target: str
    ok: bool
    why: str = ""


class _Unsent(NamedTuple):
    message: Message
    target: AlertTarget
    tries: int


def check_targets(targets: Sequence[AlertTarget]) -> None:
    """Raise ``ConfigError`` for the first address that apprise does not know.

    Without apprise the error names the extra to install.
    """
    for target in targets:
        _notifier(target)


def send(message: Message, targets: Sequence[AlertTarget]) -> list[Sent]:
    """Send a message to each target, one after the other. Each has some seconds. A failed target raises no error."""
    results = []
    for target in targets:
        try:
            notifier = _notifier(target)
            with _hushed():
                ok = bool(
                    notifier.notify(
                        body=message.body, title=message.title, notify_type=_kind(message), interpret_escapes=False
                    )
                )
            results.append(Sent(target.shown, ok, "" if ok else "it was refused, or the target did not answer"))
        except ConfigError as error:
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
        self._unsent: list[_Unsent] = []
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
        with contextlib.suppress(RelightError):
            self._keeps(self.state, self.ledger, now)
        return judged

    def _deliver(self, messages: Sequence[Message]) -> None:
        new = [
            _Unsent(message, target, 0)
            for message in messages
            for target in (self._settings.escalate_to if message.escalated else self._settings.to)
        ]
        retried = []
        for unsent in [*self._unsent, *new]:
            (sent,) = send(unsent.message, [unsent.target])
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
        self._unsent = retried[-UNSENT_MAX:]


def _notifier(target: AlertTarget):  # type: ignore[no-untyped-def] # apprise's own
    try:
        import apprise
    except ModuleNotFoundError:
        raise ConfigError("alerts need apprise", hint="pip install 'relight[alerts]'") from None
    notifier = apprise.Apprise()
    with _hushed():
        is_known = notifier.add(target.address())
    if not is_known:
        raise ConfigError(
            "that is not an address for alerts", where=target.shown, hint="docs/monitoring.md has examples"
        )
    return notifier


def _kind(message: Message) -> str:
    if message.resolved:
        return "success"
    return {"critical": "failure", "warning": "warning"}.get(message.severity, "info")


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """Disable the loggers of apprise and its transport: their lines may contain addresses."""
    loggers = [logging.getLogger(name) for name in ("apprise", "urllib3", "requests")]
    before = [(logger, logger.disabled) for logger in loggers]
    for logger in loggers:
        logger.disabled = True
    try:
        yield
    finally:
        for logger, disabled in before:
            logger.disabled = disabled
