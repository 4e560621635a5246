"""``relight metrics``: serve or print metrics for Prometheus; write dashboards and alert rules."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json, escape
from relight.errors import ConfigError
from relight.monitoring import RunSeen, Watcher
from relight.monitoring.settings import read_alerting

if TYPE_CHECKING:
    from relight.monitoring.loop import AlertLoop


@click.command("metrics")
@click.argument("paths", metavar="[RUN…]", nargs=-1)
@click.option(
    "--listen", metavar="HOST:PORT", help="Serve them under /metrics until Ctrl-C; 127.0.0.1:9464, for instance."
)
@click.option(
    "--host", "hosts", multiple=True, metavar="NAME", help="With --listen: a host name that scrapers use. Repeatable."
)
@click.option("--once", is_flag=True, help="Print them once in Prometheus' format: the default.")
@click.option("--alerts", is_flag=True, help="With --listen: check every 15 s, and send the alerts of relight.toml.")
@click.option(
    "--settings", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="In place of ./relight.toml."
)
@click.option(
    "--grafana",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write Grafana's dashboard there.",
)
@click.option(
    "--rules",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write Prometheus' alert rules there, also as a PrometheusRule.",
)
@json_option
def command(
    paths: tuple[str, ...],
    listen: str | None,
    hosts: tuple[str, ...],
    once: bool,
    alerts: bool,
    settings: Path | None,
    grafana: Path | None,
    rules: Path | None,
    as_json: bool,
) -> int:
    """Serve or print metrics of runs for Prometheus. RUN may be a store: all its runs.

    The metrics come from the runs' logs, and from the events of this machine's processes. Trainers serve no metrics: run this command next
    to them, or anywhere that can read the store. --grafana and --rules write files that use these metrics, and need no run.

    \b
    Examples:
      relight metrics runs
      relight metrics runs --listen 127.0.0.1:9464
      relight metrics --grafana dashboards --rules rules
    """
    if listen is not None and (once or as_json):
        raise ConfigError("--listen serves, --once and --json print: choose one")
    if alerts and listen is None:
        raise ConfigError(
            "--alerts needs --listen: a single check sends nothing", hint="relight metrics alerts check checks once"
        )
    if grafana is not None or rules is not None:
        _generate(grafana, rules, settings)
        if not paths:
            return 0
    if not paths:
        raise click.UsageError("Missing argument 'RUN…'.")
    from relight.monitoring.exposition import Collector

    watcher = Watcher(paths)
    if as_json:
        emit_json([as_value(seen) for seen in watcher.poll(time.time())])
        return 0
    collector = Collector(watcher.poll)
    if listen is not None:
        from relight.monitoring.http import serve
        from relight.monitoring.trace_export import start_traces

        alert_loop = _alarmed(watcher, settings) if alerts else None
        traces = start_traces(of_this_job=False)
        try:
            serve(collector, listen, lambda line: click.echo(escape(line), err=True), hosts)
        finally:
            if alert_loop is not None:
                alert_loop.stop()
            if traces is not None:
                traces.close()
        return 0
    click.echo(collector.text().decode(), nl=False)
    return 0


def _generate(grafana: Path | None, rules: Path | None, settings: Path | None) -> None:
    from relight.monitoring.generated import write_dashboard, write_operator_rules, write_rules

    if grafana is not None:
        click.echo(f"the dashboard is in {escape(write_dashboard(grafana))}", err=True)
    if rules is not None:
        alerting = read_alerting(settings)
        written = f"{escape(write_rules(rules, alerting))} and {escape(write_operator_rules(rules, alerting))}"
        click.echo(f"the rules are in {written}", err=True)


def _alarmed(watcher: Watcher, settings: Path | None) -> AlertLoop:
    """Start the thread that checks the rules and sends alerts. Raise ``ConfigError`` for invalid addresses."""
    from relight.monitoring.loop import AlertLoop
    from relight.monitoring.notify import Alarms, check_targets

    alerting = read_alerting(settings)
    if not alerting.to:
        raise ConfigError(
            "no address for alerts is configured", hint='[alerts] to = ["env:ALERTS_URL"] in relight.toml'
        )
    check_targets([*alerting.to, *alerting.escalate_to])
    return AlertLoop(watcher, Alarms(alerting))


def as_value(seen: RunSeen) -> dict[str, object]:
    """Return a run's metrics for ``--json``."""
    metrics = [
        {
            "name": sample.metric.name,
            "labels": dict(zip(sample.metric.labels, sample.labels, strict=True)),
            "value": sample.value,
            **({"counts": list(sample.counts)} if sample.counts else {}),
        }
        for sample in seen.samples
    ]
    return {"store": seen.store, "run": seen.run, "error": seen.error, "metrics": metrics}
