"""``relight goodput``: show where the time of a run's jobs went, by cause."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec

from relight.cli.common import drawn, json_option, open_run_at, plot_option
from relight.cli.output import emit_json, facts_list, table
from relight.errors import CheckpointNotFound
from relight.supervise.goodput import Account, merged
from relight.supervise.incidents import read_accounts
from relight.units import count_text, duration_text, percent_text


@click.command("goodput")
@click.argument("path", metavar="RUN")
@click.option("--jobs", is_flag=True, help="Show each job of the run separately.")
@plot_option("Draw where the time went.")
@json_option
def command(path: str, jobs: bool, plot: Path | None, as_json: bool) -> int:
    """Show where the time of a run's jobs went, by cause.

    Time counts as training only for steps that were not done before. All time from a failure until the next new step is charged to that
    failure: stuck, down, starting, restoring, and repeated steps. relight run records it each minute and at the end.

    \b
    Examples:
      relight goodput runs/demo
      relight goodput runs/demo --plot goodput.png
    """
    opened = open_run_at(path, warnings=False)
    accounts = read_accounts(opened.run.store, opened.run.name)
    if not accounts:
        raise CheckpointNotFound("no job of this run was supervised", where=path, hint="relight run train.py …")
    shown = accounts if jobs else [merged(accounts)]
    if plot is not None:
        from relight.supervise.plot import draw

        draw(accounts, plot)
        drawn(plot)
    if as_json:
        emit_json([{**msgspec.to_builtins(account), "goodput": round(account.goodput, 4)} for account in shown])
        return 0
    for number, account in enumerate(shown):
        if number:
            click.echo()
        _show(account, len(accounts) if not jobs else 1)
    return 0


def _show(account: Account, jobs: int) -> None:
    failures = ", ".join(f"{count} × {kind}" for kind, count in account.failures.items())
    facts_list([
        ("job", account.job if jobs == 1 else f"{jobs} jobs; the last: {account.job}"), ("since", account.began),
        ("time", duration_text(account.seconds)), ("goodput", percent_text(account.goodput)),
        ("steps", f"{count_text(account.steps)}, and {count_text(account.again)} once more"), ("failures", failures or "none"),
    ])  # fmt: skip
    click.echo()
    whole = account.seconds or 1.0
    rows = [
        [cause or "-", part, duration_text(seconds), percent_text(seconds / whole, 1)]
        for cause, part, seconds in account.rows()
    ]
    table(["failure", "spent on", "time", "share"], rows, right=("time", "share"))
