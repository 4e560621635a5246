"""``relight tag``: name a checkpoint; a tag also keeps it."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, table
from relight.errors import ConfigError


@click.command("tag")
@click.argument("path")
@click.argument("name", required=False)
@click.argument("which", required=False)
@click.option("--delete", is_flag=True, help="Remove the tag; the checkpoint stays.")
@json_option
def command(path: str, name: str | None, which: str | None, delete: bool, as_json: bool) -> None:
    """Name a checkpoint (by default the newest), or list the tags. A tagged checkpoint is never pruned.

    Giving a name again moves it; the log keeps what it named before.

    \b
    Examples:
      relight tag runs/demo good 500
      relight tag runs/demo good --delete
      relight tag runs/demo
      relight tag runs/demo@500 --hold --why "incident 42"
      relight tag runs/demo@500 --stage production
    """
    opened = open_run_at(path)
    if name is None:
        if delete:
            raise ConfigError("--delete needs the tag's name")
        pairs = sorted((tag, opened.history.find(target)) for tag, target in opened.history.tags.items())
        rows = [{"tag": tag, "id": checkpoint.id, "step": checkpoint.step} for tag, checkpoint in pairs if checkpoint]
        if as_json:
            emit_json(rows)
        elif rows:
            table(
                ["tag", "id", "step"],
                [[row["tag"], row["id"], row["step"]] for row in rows],
                right=("step",),
                wrap=("tag",),
            )
        else:
            click.echo("no tag yet")
        return
    if delete:
        if which is not None:
            raise ConfigError("--delete needs only the tag's name, which means one checkpoint")
        opened.run.tag(name, None)
        result: dict[str, object] = {"tag": name, "id": None, "step": None}
        message = f"{escape(name)} removed"
    else:
        checkpoint = opened.choose(which)
        before = opened.history.find(opened.history.tags.get(name, ""))
        opened.run.tag(name, checkpoint.id)
        result = {"tag": name, "id": checkpoint.id, "step": checkpoint.step}
        moved = f", moved from {before.id} (step {before.step})" if before and before.id != checkpoint.id else ""
        message = f"{escape(name)} → {checkpoint.id} (step {checkpoint.step}){moved}"
    if as_json:
        emit_json(result)
    else:
        click.echo(message)
