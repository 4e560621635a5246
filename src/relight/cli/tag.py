"""``relight tag``."""

from __future__ import annotations

import click

from relight.cli.common import choose, json_option, open_run_at
from relight.cli.output import emit_json, table
from relight.errors import ConfigError


@click.command("tag")
@click.argument("path")
@click.argument("name", required=False)
@click.argument("which", required=False)
@click.option("--delete", is_flag=True, help="Take the tag away.")
@json_option
def command(path: str, name: str | None, which: str | None, delete: bool, as_json: bool) -> None:
    """Name a checkpoint (by default the newest), or list the tags. A tagged checkpoint is never pruned.

    \b
    relight tag runs/demo good 500
    relight tag runs/demo good --delete
    relight tag runs/demo
    """
    run, _, history, place = open_run_at(path)
    if name is None:
        if delete:
            raise ConfigError("--delete needs the tag's name")
        found = sorted((tag, history.find(target)) for tag, target in history.tags.items())
        rows = [{"tag": tag, "id": one.id, "step": one.step} for tag, one in found if one]
        if as_json:
            emit_json(rows)
        elif rows:
            table(["tag", "id", "step"], [[row["tag"], row["id"], row["step"]] for row in rows], right=("step",))
        else:
            click.echo("no tag yet")
        return
    if delete:
        run.tag(name, None)
        result: dict[str, object] = {"tag": name, "id": None}
    else:
        one = choose(history, place, which)
        run.tag(name, one.id)
        result = {"tag": name, "id": one.id, "step": one.step}
    if as_json:
        emit_json(result)
    else:
        click.echo(f"{name} removed" if delete else f"{name} → {result['id']} (step {result['step']})")
