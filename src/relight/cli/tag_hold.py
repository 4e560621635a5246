"""``relight tag --hold``: keep a checkpoint whatever the retention rules are."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape
from relight.errors import ConfigError
from relight.run_records.holds import hold, holds_of, release


@click.command("tag --hold")
@click.argument("path")
@click.argument("which", required=False)
@click.option(
    "--why", default="", help="The reason: recorded in the log, and shown in every plan that keeps the checkpoint."
)
@click.option("--release", "let_go", is_flag=True, help="Release the hold: the rules decide again.")
@json_option
def command(path: str, which: str | None, why: str, let_go: bool, as_json: bool) -> None:
    """Keep a checkpoint whatever the retention rules are, until it is released; without WHICH, list what is on hold.

    Unlike a tag, a hold has a reason, and only its release removes it. Both are records of the log.

    \b
    Examples:
      relight tag runs/demo@1999 --hold --why "incident 42"
      relight tag runs/demo --hold
      relight tag runs/demo@1999 --hold --release
    """
    opened = open_run_at(path)
    which = which or opened.which
    holds = holds_of(opened.history)
    if which is None:
        if let_go or why:
            raise ConfigError("which checkpoint?", where=path, hint="an id, a step, a tag, latest, best or best:METRIC")
        rows = [
            {"id": checkpoint.id, "step": checkpoint.step, "why": holds[checkpoint.id]}
            for checkpoint in opened.history.live
            if checkpoint.id in holds
        ]
        if as_json:
            emit_json(rows)
        for row in rows if not as_json else ():
            click.echo(f"{row['id']}  step {row['step']:<9}  {escape(str(row['why']))}")
        if not rows and not as_json:
            click.echo("nothing is on hold")
        return
    checkpoint = opened.choose(which)
    if let_go:
        release(opened.run.store, opened.run.name, checkpoint.id, why)
    else:
        hold(opened.run.store, opened.run.name, checkpoint.id, why)
    if as_json:
        emit_json({"id": checkpoint.id, "step": checkpoint.step, "hold": not let_go, "why": why})
    else:
        click.echo(
            f"{checkpoint.id} (step {checkpoint.step}) is {'released: the rules decide' if let_go else f'on hold: {escape(why)}'}"
        )
