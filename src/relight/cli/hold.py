"""``relight hold``: keep a checkpoint whatever the rules say."""

from __future__ import annotations

import click

from relight.catalog.holds import hold, holds_of, release
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape
from relight.errors import ConfigError


@click.command("hold")
@click.argument("path")
@click.argument("which", required=False)
@click.option("--why", default="", help="The reason: it stands in the log, and in every plan that spares the checkpoint.")
@click.option("--release", "let_go", is_flag=True, help="Let it go: the rules decide again.")
@json_option
def command(path: str, which: str | None, why: str, let_go: bool, as_json: bool) -> None:
    """Keep a checkpoint whatever retention says, until it is released; without WHICH, list what is on hold.

    Unlike a tag it has a reason, and nothing but its release takes it away. Both are records of the log.

    \b
    Examples:
      relight hold runs/demo 1999 --why "incident 42"
      relight hold runs/demo
      relight hold runs/demo 1999 --release
    """
    found = open_run_at(path)
    which = which or found.which
    holds = holds_of(found.history)
    if which is None:
        if let_go or why:
            raise ConfigError("which checkpoint?", where=path, hint="an id, a step, a tag, latest, best or best:METRIC")
        rows = [{"id": one.id, "step": one.step, "why": holds[one.id]} for one in found.history.live if one.id in holds]
        if as_json:
            emit_json(rows)
        for row in rows if not as_json else ():
            click.echo(f"{row['id']}  step {row['step']:<9}  {escape(str(row['why']))}")
        if not rows and not as_json:
            click.echo("nothing is on hold")
        return
    one = found.choose(which)
    if let_go:
        release(found.run.store, found.run.name, one.id, why)
    else:
        hold(found.run.store, found.run.name, one.id, why)
    if as_json:
        emit_json({"id": one.id, "step": one.step, "hold": not let_go, "why": why})
    else:
        click.echo(f"{one.id} (step {one.step}) is {'released: the rules decide' if let_go else f'on hold: {escape(why)}'}")
