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
@click.option("--delete", is_flag=True, help="Take the tag away; the checkpoint stays.")
@json_option
def command(path: str, name: str | None, which: str | None, delete: bool, as_json: bool) -> None:
    """Name a checkpoint (by default the newest), or list the tags. A tagged checkpoint is never pruned.

    Giving a name again moves it; the log keeps what it named before.

    \b
    Examples:
      relight tag runs/demo good 500
      relight tag runs/demo good --delete
      relight tag runs/demo
    """
    found = open_run_at(path)
    if name is None:
        if delete:
            raise ConfigError("--delete needs the tag's name")
        pairs = sorted((tag, found.history.find(target)) for tag, target in found.history.tags.items())
        rows = [{"tag": tag, "id": one.id, "step": one.step} for tag, one in pairs if one]
        if as_json:
            emit_json(rows)
        elif rows:
            table(["tag", "id", "step"], [[row["tag"], row["id"], row["step"]] for row in rows], right=("step",), wrap=("tag",))
        else:
            click.echo("no tag yet")
        return
    if delete:
        if which is not None:
            raise ConfigError("--delete takes the tag's name alone: it names one checkpoint anyway")
        found.run.tag(name, None)
        result: dict[str, object] = {"tag": name, "id": None, "step": None}
        said = f"{escape(name)} removed"
    else:
        one = found.choose(which)
        before = found.history.find(found.history.tags.get(name, ""))
        found.run.tag(name, one.id)
        result = {"tag": name, "id": one.id, "step": one.step}
        moved = f", moved from {before.id} (step {before.step})" if before and before.id != one.id else ""
        said = f"{escape(name)} → {one.id} (step {one.step}){moved}"
    if as_json:
        emit_json(result)
    else:
        click.echo(said)
