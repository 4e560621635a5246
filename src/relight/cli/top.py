"""``relight top``: watch runs live in the terminal."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.errors import ConfigError
from relight.monitoring import RunSeen, Watcher
from relight.monitoring.alert_delivery import clean
from relight.monitoring.rules import FIRING, Alert, as_dict, judge
from relight.monitoring.settings import Alerting, read_alerting
from relight.units import count_text, duration_text, percent_text, size_text

if TYPE_CHECKING:
    from rich.table import Table

COLUMNS = ("run", "step", "good", "blocked", "durable", "size", "tiers", "goodput", "failed", "risk")
RIGHT = ("step", "good", "blocked", "durable", "size", "goodput", "failed", "risk")
ALERTS_SHOWN = 8


@click.command("top")
@click.argument("paths", metavar="RUN…", nargs=-1, required=True)
@click.option(
    "--every",
    type=click.FloatRange(0.2, 3600),
    default=2.0,
    metavar="S",
    help="Seconds between two updates; 2 by default.",
)
@click.option("--once", is_flag=True, help="Print once, and end: the default in a pipe.")
@click.option(
    "--settings",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="In place of ./relight.toml, for alerts.",
)
@json_option
def command(paths: tuple[str, ...], every: float, once: bool, settings: Path | None, as_json: bool) -> int:
    """Watch runs live: newest checkpoint, saves, tiers, goodput, failures, risk, alerts. RUN may be a store: all its runs.

    good: age of the newest good checkpoint. blocked, durable: how long saves blocked training, and took until they were durable; medians of
    the saves that this machine's processes recorded. failed: failures of the job within an hour.

    \b
    Examples:
      relight top runs
      relight top runs/demo --once --json
    """
    alerting = read_alerting(settings)
    watcher = Watcher(paths)
    if as_json:
        now = time.time()
        seen = watcher.poll(now)
        emit_json(
            {
                "time": now,
                "runs": [as_value(item) for item in seen],
                "alerts": [as_dict(item) for item in _alerts(alerting, seen, now)],
            }
        )
        return 0
    if once or not sys.stdout.isatty():
        now = time.time()
        _print(watcher, watcher.poll(now), alerting, now)
        return 0
    _live(watcher, alerting, every)
    return 0


def as_value(seen: RunSeen) -> dict[str, Any]:
    """Return a run's fields for ``--json``, without the samples, which ``relight metrics --json`` has."""
    facts = seen._asdict()
    for name in ("samples", "account", "incidents"):
        del facts[name]
    incidents = [
        {"id": incident.id, "at": incident.at, "kind": incident.kind, "why": incident.why, "action": incident.action}
        for incident in seen.incidents[-20:]
    ]
    saving = {**seen.saving._asdict(), "last": [save._asdict() for save in seen.saving.last[-20:]]}
    tiers = [{**tier._asdict(), "full": tier.full} for tier in seen.tiers]
    return {**facts, "bad": dict(seen.bad), "saving": saving, "tiers": tiers, "incidents": incidents}


def _alerts(alerting: Alerting, seen: Sequence[RunSeen], now: float) -> list[Alert]:
    rules = [rule._replace(for_s=0.0) for rule in alerting.rules]
    return [
        alert._replace(reason=clean(alert.reason))
        for alert in judge(rules, seen, now, {}).state.values()
        if alert.state == FIRING
    ]


def _print(watcher: Watcher, seen: Sequence[RunSeen], alerting: Alerting, now: float) -> None:
    rows, columns = _rows(seen), list(COLUMNS)
    for index in reversed(range(len(columns))):  # columns without a value are dropped, as lines have 80 characters
        if index > 2 and all(_text(row[index]) in ("–", "0") for row in rows):
            del columns[index]
            rows = [[cell for number, cell in enumerate(row) if number != index] for row in rows]
    if rows:
        table(columns, rows, right=[name for name in RIGHT if name in columns], wrap=("run", "tiers"))
    else:
        click.echo("no run yet")
    for line, _ in _lines(watcher, seen, _alerts(alerting, seen, now)):
        click.echo(line)


def _rows(seen: Sequence[RunSeen]) -> list[list[object]]:
    return [_row(run) for run in seen]


def _row(run: RunSeen) -> list[object]:
    if not run.run:
        return [Styled(escape(run.store), "red"), *["–"] * (len(COLUMNS) - 1)]
    name = Styled(run.run, "red" if run.error else "" if run.active else "dim")
    lagging = [f"{tier.name} +{tier.lag}" for tier in run.tiers[1:] if tier.lag]
    tiers = " ".join(lagging) or ("all" if len(run.tiers) > 1 else "–")
    saving = run.saving
    return [
        name,
        "–" if run.step is None else run.step,
        "–" if run.good_age_s is None else duration_text(run.good_age_s),
        "–" if saving.blocked_s is None else duration_text(saving.blocked_s),
        Styled("failed", "red")
        if saving.failed_in_a_row
        else "–"
        if saving.durable_s is None
        else duration_text(saving.durable_s),
        size_text(run.stored_bytes) if run.step is not None else "–",
        Styled(tiers, "yellow") if lagging else tiers,
        "–" if run.goodput is None else percent_text(run.goodput),
        Styled(run.recent_failures, "red") if run.recent_failures else "0",
        Styled(f"{run.risk:.2f}", "yellow") if run.risk else "–",
    ]


def _text(cell: object) -> str:
    return str(cell.text if isinstance(cell, Styled) else cell)


def _lines(watcher: Watcher, seen: Sequence[RunSeen], alerts: Sequence[Alert]) -> list[tuple[str, str]]:
    """Return the lines below the table: alerts, the number of runs, why there are no events."""
    lines = [("", "")]
    for alert in alerts[:ALERTS_SHOWN]:
        style = "red" if alert.severity == "critical" else "yellow"
        lines.append((f"{alert.severity}: {escape(alert.run or alert.store)}: {escape(alert.reason)}", style))
    if len(alerts) > ALERTS_SHOWN:
        lines.append((f"… and {len(alerts) - ALERTS_SHOWN} alerts more: relight metrics alerts check", "yellow"))
    runs = [run for run in seen if run.run]
    active = sum(run.active and not run.error for run in runs)
    lines.append((f"{count_text(len(runs), 'run')}, {active} active; {count_text(len(alerts), 'alert')}", ""))
    if watcher.why_no_events:
        lines.append((escape(watcher.why_no_events), ""))
    return lines


def _live(watcher: Watcher, alerting: Alerting, every: float) -> None:
    try:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.text import Text
    except ModuleNotFoundError:
        raise ConfigError("the live view needs rich", hint="pip install rich, or relight top --once") from None

    with Live(console=Console(highlight=False), auto_refresh=False, screen=True) as live:
        while True:
            now = time.time()
            seen = watcher.poll(now)
            lines = [Text(line, style) for line, style in _lines(watcher, seen, _alerts(alerting, seen, now))]
            head = Text(
                f"relight top · {time.strftime('%H:%M:%S')} · every {duration_text(every)} · Ctrl-C ends", "dim"
            )
            live.update(Group(head, Text(""), _rich(_rows(seen)), *lines), refresh=True)
            time.sleep(every)


def _rich(rows: Sequence[Sequence[object]]) -> Table:
    from rich.table import Table
    from rich.text import Text

    shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="bold", expand=False)
    for name in COLUMNS:
        shown.add_column(
            name, justify="right" if name in RIGHT else "left", no_wrap=name not in ("run", "tiers"), overflow="fold"
        )
    for row in rows:
        shown.add_row(*(Text(escape(_text(cell)), cell.style if isinstance(cell, Styled) else "") for cell in row))
    return shown
