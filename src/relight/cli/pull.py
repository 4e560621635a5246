"""``relight pull``: bring a run all that another store has and it lacks."""

from __future__ import annotations

import click

from relight.cli.common import json_option
from relight.cli.push import exchange


@click.command("pull")
@click.argument("remote")
@click.argument("run")
@click.option("--force", is_flag=True, help="Also into a run with another history, and move tags that are on others there.")
@click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
@json_option
def command(run: str, remote: str, force: bool, dry_run: bool, as_json: bool) -> int:
    """Bring RUN, or a store, all that REMOTE has and it lacks: checkpoints, and the tags on them.

    Every byte is verified on the way. Said again after an interruption, it goes on where it was. A run with another
    history is refused without --force. Exit code 1 if something was damaged, or a tag stays where it is.

    \b
    Examples:
      relight pull s3://bucket/runs/demo runs/
      relight pull /backup/demo runs/demo --dry-run
    """
    return exchange(remote, run, "pulled", force, dry_run, as_json)
