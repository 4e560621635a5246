"""Sending what is to be told, by apprise: Slack, e-mail, PagerDuty, webhooks and a hundred more. Addresses never reach logs or texts."""

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
"""How often a message is tried, once a look, until it is given up."""
UNSENT_MAX = 100


class Sent(NamedTuple):
    """What became of a message at one of its targets."""

    target: str
    ok: bool
    why: str = ""


class _Unsent(NamedTuple):
    message: Message
    target: AlertTarget
    tries: int


def check_targets(targets: Sequence[AlertTarget]) -> None:
    """``ConfigError`` for the first that is no address apprise knows, and that names the extra if apprise is not there."""
    for target in targets:
        _notifier(target)


def send(message: Message, targets: Sequence[AlertTarget]) -> list[Sent]:
    """To each of them, one after the other; each has some seconds. Never raises for a target's sake."""
    found = []
    for target in targets:
        try:
            notifier = _notifier(target)
            with _hushed():
                ok = bool(notifier.notify(body=message.body, title=message.title, notify_type=_kind(message), interpret_escapes=False))
            found.append(Sent(target.shown, ok, "" if ok else "it was not taken, or nobody answered"))
        except ConfigError as error:
            found.append(Sent(target.shown, False, error.what))
        except Exception as error:  # noqa: BLE001 (a plug-in's own; told, without its words, which may hold the address)
            found.append(Sent(target.shown, False, type(error).__name__))
    return found


class Alarms:
    """Judges what is seen, tells what changed. One thread looks; any may read ``alerts``."""

    def __init__(
        self, settings: Alerting, state: State | None = None, ledger: Ledger | None = None,
        keeps: Callable[[State, Ledger, float], None] = lambda state, ledger, now: None,
    ) -> None:  # fmt: skip
        """``keeps`` is called behind each look with what the next one is to be given; where it cannot be kept, alerts are told as ever."""
        self._settings, self._keeps = settings, keeps
        self.state: dict[tuple[str, str, str, str], Alert] = dict(state or {})
        """What is pending or firing: to be kept, and given to the next one, if alerts are not to be told anew."""
        self.ledger = ledger or Ledger()
        self._unsent: list[_Unsent] = []
        self._lock = threading.Lock()

    @property
    def alerts(self) -> list[Alert]:
        """What is pending or fires now, the longest first."""
        with self._lock:
            return sorted(self.state.values(), key=lambda one: (one.state != FIRING, one.since, one.key))

    def update(self, runs: Sequence[RunSeen], now: float) -> AlertChanges:
        """Judge these runs, tell of what changed; delivering takes as long as it takes."""
        with self._lock:
            judged = judge(self._settings.rules, runs, now, self.state)
            self.state = judged.state
            messages, self.ledger = plan_messages(judged.changes, judged.state, self.ledger, self._settings, now)
        for one in judged.changes:
            about = {"kind": one.kind, "severity": one.severity, "store": clean(one.store), "run": run_name(one.run), "about": one.about}
            emit("alert.fired" if one.state == FIRING else "alert.resolved", line_of(one), **about)
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
        left = []
        for one in [*self._unsent, *new]:
            (sent,) = send(one.message, [one.target])
            if sent.ok:
                continue
            if one.tries + 1 < TRIES:
                left.append(one._replace(tries=one.tries + 1))
            else:
                emit("alert.unsent", f"{sent.target} did not get {one.message.title!r}: {sent.why}", target=sent.target, why=sent.why)
        self._unsent = left[-UNSENT_MAX:]


def _notifier(target: AlertTarget):  # type: ignore[no-untyped-def] # apprise's own
    try:
        import apprise
    except ModuleNotFoundError:
        raise ConfigError("alerts need apprise", hint="pip install 'relight[alerts]'") from None
    found = apprise.Apprise()
    with _hushed():
        known = found.add(target.address())
    if not known:
        raise ConfigError("that is no address of alerts", where=target.shown, hint="docs/monitoring.md has examples")
    return found


def _kind(message: Message) -> str:
    if message.resolved:
        return "success"
    return {"critical": "failure", "warning": "warning"}.get(message.severity, "info")


@contextlib.contextmanager
def _hushed() -> Iterator[None]:
    """What apprise and its transport log may hold addresses: nothing of it is."""
    loggers = [logging.getLogger(name) for name in ("apprise", "urllib3", "requests")]
    before = [(one, one.disabled) for one in loggers]
    for one in loggers:
        one.disabled = True
    try:
        yield
    finally:
        for one, disabled in before:
            one.disabled = disabled
