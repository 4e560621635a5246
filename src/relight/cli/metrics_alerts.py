"""``relight metrics alerts``: ``check``, ``test``, ``list``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, table
from relight.errors import ConfigError
from relight.monitoring import Watcher
from relight.monitoring.alert_delivery import clean, trial_message
from relight.monitoring.rules import FIRING, KINDS, Alert, AlertRule, as_dict, judge
from relight.monitoring.settings import Alerting, read_alerting
from relight.units import count_text, duration_text

settings_option = click.option(
    "--settings", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="In place of ./relight.toml."
)


@click.group("metrics alerts")
def command() -> None:
    """Check what would fire, list the alert rules, send a test.

    Rules and addresses are in the table [alerts] of relight.toml. relight metrics --listen … --alerts checks continuously and sends alerts.

    \b
    Examples:
      relight metrics alerts check runs
      relight metrics alerts test
    """


@command.command("check")
@click.argument("paths", metavar="RUN…", nargs=-1, required=True)
@settings_option
@json_option
def check(paths: tuple[str, ...], settings: Path | None, as_json: bool) -> int:
    """Show which rules would fire now, also those that must hold for a while. Nothing is sent. Exit code 1 if any would fire.

    \b
    Examples:
      relight metrics alerts check runs
      relight metrics alerts check runs/demo --json
    """
    rules = [rule._replace(for_s=0.0) for rule in read_alerting(settings).rules]
    watcher = Watcher(paths)
    now = time.time()
    seen = watcher.poll(now)
    alerts = [alert for alert in judge(rules, seen, now, {}).state.values() if alert.state == FIRING]
    if as_json:
        emit_json([{**as_dict(alert), "reason": clean(alert.reason)} for alert in alerts])
    elif alerts:
        table(["severity", "alert", "run", "why"], [_row(alert) for alert in alerts], wrap=("why",))
    else:
        click.echo(f"nothing: {count_text(len(rules), 'rule')}, {count_text(len(seen), 'run')}")
    return 1 if alerts else 0


@command.command("list")
@settings_option
@json_option
def list_(settings: Path | None, as_json: bool) -> int:
    """List the rules, and the addresses that alerts are sent to.

    \b
    Examples:
      relight metrics alerts list
      relight metrics alerts list --json
    """
    alerting = read_alerting(settings)
    if as_json:
        emit_json(_as_value(alerting))
        return 0
    rows = [
        [
            rule.kind, _limit(rule), _severity(rule.severity), duration_text(rule.for_s) if rule.for_s else "", " ".join(rule.runs),
            KINDS[rule.kind].summary,
        ]
        for rule in alerting.rules
    ]  # fmt: skip
    table(["rule", "limit", "severity", "for", "runs", "means"], rows, wrap=("means",))
    to = ", ".join(target.shown for target in alerting.to) or "no address: [alerts] to is empty"
    click.echo(f"\nto: {to}")
    if alerting.escalate_to:
        targets = ", ".join(target.shown for target in alerting.escalate_to)
        click.echo(f"after {duration_text(alerting.escalate_after_s)}, what is critical: {targets}")
    return 0


@command.command("test")
@settings_option
@json_option
def test(settings: Path | None, as_json: bool) -> int:
    """Send a test message to every address, also those of the escalation. Exit code 1 if an address did not accept it.

    \b
    Examples:
      relight metrics alerts test
      relight metrics alerts test --settings /etc/relight.toml
    """
    from relight.monitoring.notify import send

    alerting = read_alerting(settings)
    targets = [*alerting.to, *alerting.escalate_to]
    if not targets:
        raise ConfigError(
            "no address for alerts is configured", hint='[alerts] to = ["env:ALERTS_URL"] in relight.toml'
        )
    sent = send(trial_message(), targets)
    if as_json:
        emit_json([delivery._asdict() for delivery in sent])
    else:
        rows = [
            [delivery.target, Styled("sent", "green") if delivery.ok else Styled("not sent", "red"), delivery.why]
            for delivery in sent
        ]
        table(["address", "", "why"], rows, wrap=("why",))
    return 0 if all(delivery.ok for delivery in sent) else 1


def _row(alert: Alert) -> list[object]:
    return [_severity(alert.severity), alert.kind, alert.run or alert.store, clean(alert.reason)]


def _severity(name: str) -> Styled:
    return Styled(name, {"critical": "red", "warning": "yellow"}.get(name, ""))


def _limit(rule: AlertRule) -> str:
    name = KINDS[rule.kind].limit
    return f"{name} = {rule.limit:g}" if name else ""


def _as_value(alerting: Alerting) -> dict[str, object]:
    return {
        "to": [target.shown for target in alerting.to], "escalate_to": [target.shown for target in alerting.escalate_to],
        "min_severity": alerting.min_severity, "group_s": alerting.group_s, "repeat_s": alerting.repeat_s,
        "escalate_after_s": alerting.escalate_after_s, "timezone": str(alerting.timezone), "quiet_now": alerting.is_quiet(time.time()),
        "rules": [rule._asdict() for rule in alerting.rules],
    }  # fmt: skip
