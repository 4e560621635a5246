"""``relight cp``."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.find import resolve
from relight.cli.common import choose, json_option, open_run_at
from relight.cli.output import emit_json, progress, size
from relight.format.names import check_run_name
from relight.store import open_bytes
from relight.store.urls import split_run
from relight.transfer import execute_copy, plan_copy


@click.command("cp")
@click.argument("source")
@click.argument("destination")
@click.option("--which", multiple=True, help="An id, step, tag, 'latest' or 'best'; may be given several times.")
@click.option("--all", "everything", is_flag=True, help="All checkpoints of the run.")
@click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
@json_option
def command(source: str, destination: str, which: tuple[str, ...], everything: bool, dry_run: bool, as_json: bool) -> None:
    """Copy checkpoints (by default the newest) of SOURCE to DESTINATION, a store/run that is made if needed.

    Every byte is verified on the way. Said again after an interruption, it goes on where it was.

    \b
    relight cp runs/demo /backup/demo
    relight cp runs/demo /backup/demo --all
    """
    run, _, history, place = open_run_at(source)
    chosen = list(history.live) if everything else [resolve(history, one) for one in which] or [choose(history, place, None)]
    url, name = split_run(destination)
    plan = plan_copy(run, chosen, open_bytes(url), check_run_name(name))
    if dry_run:
        rows: list[dict[str, Any]] = [{"id": one.id, "step": one.step, "bytes": one.body.stored_bytes} for one in plan.checkpoints]
        if as_json:
            emit_json({"dry_run": True, "copy": rows, "there": plan.there})
        else:
            for row in rows:
                click.echo(f"{row['id']}  step {row['step']}  {size(row['bytes'])}")
            click.echo(f"{len(rows)} to copy, {size(plan.bytes)}; {len(plan.there)} are there already")
        return
    with progress("copying", plan.bytes) as advance:
        report = execute_copy(plan, progress=advance)
    if as_json:
        emit_json({"copied": [{"id": old, "id_there": new} for old, new in report.copied], "there": report.there})
    else:
        click.echo(f"copied {len(report.copied)} checkpoints, {size(plan.bytes)}; {len(report.there)} were there already")
