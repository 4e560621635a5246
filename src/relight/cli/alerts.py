"""``relight alerts``: ``check``, ``test``, ``list``."""

from __future__ import annotations

import time
from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, plural, table
from relight.errors import ConfigError
from relight.monitoring import Watcher
from relight.monitoring.alert_delivery import clean, trial_message
from relight.monitoring.rules import FIRING, KINDS, Alert, AlertRule, as_dict, judge, spell
from relight.monitoring.settings import Alerting, read_alerting

settings_option = click.option(
    "--settings", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="In place of ./relight.toml."
)


@click.group("alerts")
def command() -> None:
    """What is worth an alert: look, list the rules, send a test.

    Rules and addresses are in the table [alerts] of relight.toml. relight metrics --listen … --alerts looks all the time, and tells.

    \b
    Examples:
      relight alerts check runs
      relight alerts test
    """


@command.command("check")
@click.argument("paths", metavar="RUN…", nargs=-1, required=True)
@settings_option
@json_option
def check(paths: tuple[str, ...], settings: Path | None, as_json: bool) -> int:
    """What would fire now, rules that must hold for a while too. Nothing is sent. Exit status 1 if anything would.

    \b
    Examples:
      relight alerts check runs
      relight alerts check runs/demo --json
    """
    rules = [rule._replace(for_s=0.0) for rule in read_alerting(settings).rules]
    watcher = Watcher(paths)
    now = time.time()
    seen = watcher.poll(now)
    alerts = [one for one in judge(rules, seen, now, {}).state.values() if one.state == FIRING]
    if as_json:
        emit_json([{**as_dict(one), "reason": clean(one.reason)} for one in alerts])
    elif alerts:
        table(["severity", "alert", "run", "why"], [_row(one) for one in alerts], wrap=("why",))
    else:
        click.echo(f"nothing: {plural(len(rules), 'rule')}, {plural(len(seen), 'run')}")
    return 1 if alerts else 0


@command.command("list")
@settings_option
@json_option
def list_(settings: Path | None, as_json: bool) -> int:
    """The rules as they are set, and to how many addresses alerts go.

    \b
    Examples:
      relight alerts list
      relight alerts list --json
    """
    found = read_alerting(settings)
    if as_json:
        emit_json(_as_value(found))
        return 0
    rows = [
        [
            rule.kind, _limit(rule), _severity(rule.severity), spell(rule.for_s) if rule.for_s else "", " ".join(rule.runs),
            KINDS[rule.kind].says,
        ]
        for rule in found.rules
    ]  # fmt: skip
    table(["rule", "limit", "severity", "for", "runs", "means"], rows, wrap=("means",))
    to = ", ".join(target.shown for target in found.to) or "nobody: [alerts] to is empty"
    click.echo(f"\nto: {to}")
    if found.escalate_to:
        click.echo(f"after {spell(found.escalate_after_s)}, what is critical: {', '.join(target.shown for target in found.escalate_to)}")
    return 0


@command.command("test")
@settings_option
@json_option
def test(settings: Path | None, as_json: bool) -> int:
    """Send a test message to every address, those of the escalation too. Exit status 1 if one did not take it.

    \b
    Examples:
      relight alerts test
      relight alerts test --settings /etc/relight.toml
    """
    from relight.monitoring.notify import send

    found = read_alerting(settings)
    targets = [*found.to, *found.escalate_to]
    if not targets:
        raise ConfigError("there is nobody to tell", hint='[alerts] to = ["env:ALERTS_URL"] in relight.toml')
    sent = send(trial_message(), targets)
    if as_json:
        emit_json([one._asdict() for one in sent])
    else:
        rows = [[one.target, Styled("sent", "green") if one.ok else Styled("not sent", "red"), one.why] for one in sent]
        table(["address", "", "why"], rows, wrap=("why",))
    return 0 if all(one.ok for one in sent) else 1


def _row(one: Alert) -> list[object]:
    return [_severity(one.severity), one.kind, one.run or one.store, clean(one.reason)]


def _severity(name: str) -> Styled:
    return Styled(name, {"critical": "red", "warning": "yellow"}.get(name, ""))


def _limit(rule: AlertRule) -> str:
    name = KINDS[rule.kind].limit
    return f"{name} = {rule.limit:g}" if name else ""


def _as_value(found: Alerting) -> dict[str, object]:
    return {
        "to": [target.shown for target in found.to], "escalate_to": [target.shown for target in found.escalate_to],
        "min_severity": found.min_severity, "group_s": found.group_s, "repeat_s": found.repeat_s,
        "escalate_after_s": found.escalate_after_s, "timezone": str(found.timezone), "quiet_now": found.is_quiet(time.time()),
        "rules": [rule._asdict() for rule in found.rules],
    }  # fmt: skip
