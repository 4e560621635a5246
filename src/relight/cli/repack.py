"""``relight repack``: make checkpoints that need others' bytes self-contained."""

from __future__ import annotations

import click

from relight.cli.common import engine_of, engine_options, json_option, open_run_at
from relight.cli.output import emit_json
from relight.observe.progress_bar import progress_bar
from relight.transfer.repack import execute_repack, plan_repack
from relight.units import count_text, size_text


@click.command("repack")
@click.argument("path")
@click.argument("which", nargs=-1)
@click.option("--dry-run", is_flag=True, help="Only show which, and how many bytes.")
@engine_options()
@json_option
def command(
    path: str, which: tuple[str, ...], dry_run: bool, engine: str | None, jobs: int | None, as_json: bool
) -> None:
    """Make checkpoints that need others' bytes self-contained: WHICH of a run (ids, steps, tags, latest), or all of them.

    What compact= stored as references and differences is written in full, verified, next to it. Retention may then remove the others.

    \b
    Examples:
      relight repack runs/demo latest
      relight repack runs/demo --dry-run
    """
    opened = open_run_at(path)
    names = which or ((opened.which,) if opened.which else ())
    plan = plan_repack(opened.run, {opened.choose(name).id for name in names} if names else None)
    if dry_run:
        if as_json:
            emit_json(
                {
                    "repacked": [checkpoint.id for checkpoint in plan.chosen],
                    "bytes": plan.bytes,
                    "freed": [],
                    "dry_run": True,
                }
            )
        else:
            click.echo(
                f"{count_text(len(plan.chosen), 'checkpoint')} would be written out, {size_text(plan.bytes)}"
                if plan.chosen
                else _NOTHING
            )
        return
    with engine_of(engine, jobs) as workers, progress_bar("repacking", plan.bytes) as meter:
        report = execute_repack(plan, meter, engine=workers)
    if as_json:
        emit_json({"repacked": report.repacked, "bytes": report.bytes, "freed": report.freed, "dry_run": False})
    elif not report.repacked:
        click.echo(_NOTHING)
    else:
        freed = f"; {count_text(len(report.freed), 'other')} needed no more" if report.freed else ""
        stand = "stands by itself" if len(report.repacked) == 1 else "stand by themselves"
        click.echo(
            f"{count_text(len(report.repacked), 'checkpoint')} {stand} now, {size_text(report.bytes)} written{freed}"
        )


_NOTHING = "nothing to do: they stand by themselves"
