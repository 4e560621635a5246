"""``relight branch``: fork a run from a checkpoint without copying bytes."""

from __future__ import annotations

import click

from relight.audit.audit_log import user
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, table
from relight.errors import ConfigError
from relight.versions.branching import branch, branches_of, drop


@click.command("branch")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("name", required=False)
@click.option("--why", default="", help="Purpose of the branch; recorded in the log.")
@click.option("--drop", "dropped", is_flag=True, help="Release the checkpoint that is kept for a branch that is gone.")
@json_option
def command(path: str, name: str | None, why: str, dropped: bool, as_json: bool) -> None:
    """Make a run NAME, in the same store, that continues from a checkpoint of this run; or list the run's branches.

    No bytes are copied: the checkpoint stays where it is, and is kept there as long as the branch has it. Train with
    Checkpointer("STORE/NAME", …): restore() finds it, and later saves belong to the branch. Set what must differ, such as the
    learning rate, after restore().

    \b
    Examples:
      relight branch runs/demo@2000 lower-lr --why "half the rate from here"
      relight branch runs/demo
      relight branch runs/demo lower-lr --drop
    """
    opened = open_run_at(path)
    if name is None:
        if dropped:
            raise ConfigError("--drop needs the branch's name")
        rows = [
            {"branch": branch_.name, "id": branch_.checkpoint.id, "step": branch_.checkpoint.step}
            for branch_ in branches_of(opened.run)
        ]
        if as_json:
            emit_json(rows)
        elif rows:
            table(
                ["branch", "from", "step"],
                [[row["branch"], row["id"], row["step"]] for row in rows],
                right=("step",),
                wrap=("branch",),
            )
        else:
            click.echo("no branch yet")
        return
    if dropped:
        made = drop(opened.run, name)
        message = f"{escape(name)} holds nothing of {escape(opened.run.name)} any more"
    else:
        made = branch(opened.run, opened.choose(None), name, by=user(), why=why)
        checkpoint = made.checkpoint
        message = f"{escape(name)} continues from {checkpoint.id} (step {checkpoint.step}) of {escape(made.home)}" + (
            "" if made.made else ", as before"
        )
    if as_json:
        emit_json(
            {
                "branch": made.name,
                "home": made.home,
                "id": made.checkpoint.id,
                "step": made.checkpoint.step,
                "made": made.made,
            }
        )
    else:
        click.echo(message)
