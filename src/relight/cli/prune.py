"""``relight prune``."""

from __future__ import annotations

import sys

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, progress, size, table
from relight.errors import ConfigError
from relight.policy import keep
from relight.reclaim import execute, execute_sweep, plan_prune, plan_sweep


@click.command("prune")
@click.argument("path")
@click.option("--keep-last", type=int, help="Keep the newest N.")
@click.option("--keep-best", type=int, help="Keep the N best by --metric.")
@click.option("--metric", default="loss", show_default=True, help="What --keep-best goes by.")
@click.option("--mode", type=click.Choice(["min", "max"]), default="min", show_default=True, help="Whether less or more is better.")
@click.option("--keep-every", type=int, help="Keep those after every N steps.")
@click.option("--sweep", is_flag=True, help="Also delete what superseded attempts left unfinished.")
@click.option("--dry-run", is_flag=True, help="Only say what would go, and why.")
@click.option("--yes", is_flag=True, help="Do not ask.")
@json_option
def command(
    path: str,
    keep_last: int | None,
    keep_best: int | None,
    metric: str,
    mode: str,
    keep_every: int | None,
    sweep: bool,
    dry_run: bool,
    yes: bool,
    as_json: bool,
) -> None:
    """Remove the checkpoints that no rule keeps. Tagged ones, the newest, and the newest that verifies always stay.

    \b
    relight prune runs/demo --keep-last 3 --keep-every 1000 --dry-run
    """
    rules = keep(last=keep_last, best=keep_best, metric=metric, mode=mode, every=keep_every)
    if rules.is_everything and not sweep:
        raise ConfigError("no rule given", hint="--keep-last N, --keep-best N, --keep-every N, or --sweep")
    run, _, history, _ = open_run_at(path)
    newest = history.live[-1].body.stored_bytes if history.live else 0
    with progress("verifying what stays", newest) as advance:
        plan = plan_prune(run.store, run.name, rules, progress=advance)
    swept = plan_sweep(run.store, run.name) if sweep else None
    if not as_json:
        rows = [[v.id, v.step, "stays" if v.keep else "GOES", v.reason] for v in plan.verdicts]
        table(["id", "step", "", "because"], rows, right=("step",))
        for name, reason in swept.directories if swept else ():
            click.echo(f"{name}  GOES  {reason}")
        click.echo(f"{len(plan.going)} go, {size(plan.bytes_freed)}" + (" (dry run: nothing was done)" if dry_run else ""))
    doing = bool(plan.going or (swept and swept.directories)) and not dry_run
    if doing and not yes and not as_json and sys.stdin.isatty() and not click.confirm("Remove them?"):
        doing = False
    report = execute(plan, run.store) if doing else None
    swept_report = execute_sweep(swept, run.store) if doing and swept else None
    if as_json:
        emit_json(
            {
                "dry_run": dry_run,
                "checkpoints": [{"id": v.id, "step": v.step, "keep": v.keep, "reason": v.reason} for v in plan.verdicts],
                "bytes_freed": plan.bytes_freed,
                "retired": report.retired if report else [],
                "deleted": [*(report.deleted if report else []), *(swept_report.deleted if swept_report else [])],
                "left": [*(report.left if report else []), *(swept_report.left if swept_report else [])],
            }
        )
