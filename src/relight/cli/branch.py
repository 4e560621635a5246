"""``relight branch``: fork a run from a checkpoint, at no cost in bytes."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, table
from relight.errors import ConfigError
from relight.versions.branching import branch, branches_of, drop
from relight.versions.stages import who


@click.command("branch")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("name", required=False)
@click.option("--why", default="", help="What it is for; the log keeps it.")
@click.option("--drop", "dropped", is_flag=True, help="Let go what the run holds for a branch that is gone.")
@json_option
def command(path: str, name: str | None, why: str, dropped: bool, as_json: bool) -> None:
    """Make a run NAME, beside this one, that goes on from a checkpoint of it; or list its branches.

    It costs no bytes: the checkpoint stays where it is, and is kept there as long as the branch has it. Train with
    Checkpointer("STORE/NAME", …): restore() finds it, and everything saved from then on is the branch's own. Set what is
    to be different, such as the learning rate, behind restore().

    \b
    Examples:
      relight branch runs/demo@2000 lower-lr --why "half the rate from here"
      relight branch runs/demo
      relight branch runs/demo lower-lr --drop
    """
    found = open_run_at(path)
    if name is None:
        if dropped:
            raise ConfigError("--drop needs the branch's name")
        rows = [{"branch": one.name, "id": one.checkpoint.id, "step": one.checkpoint.step} for one in branches_of(found.run)]
        if as_json:
            emit_json(rows)
        elif rows:
            table(["branch", "from", "step"], [[row["branch"], row["id"], row["step"]] for row in rows], right=("step",), wrap=("branch",))
        else:
            click.echo("no branch yet")
        return
    if dropped:
        made = drop(found.run, name)
        said = f"{escape(name)} holds nothing of {escape(found.run.name)} any more"
    else:
        made = branch(found.run, found.choose(None), name, by=who(), why=why)
        one = made.checkpoint
        said = f"{escape(name)} goes on from {one.id} (step {one.step}) of {escape(made.home)}" + ("" if made.made else ", as before")
    if as_json:
        emit_json({"branch": made.name, "home": made.home, "id": made.checkpoint.id, "step": made.checkpoint.step, "made": made.made})
    else:
        click.echo(said)
