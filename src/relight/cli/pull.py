"""``relight pull``: copy missing checkpoints from another store to a run."""

from __future__ import annotations

import click

from relight.cli.common import engine_of, engine_options, json_option
from relight.cli.push import exchange


@click.command("pull")
@click.argument("remote")
@click.argument("run")
@click.option("--force", is_flag=True, help="Also into a run with another history; also move tags there.")
@click.option("--dry-run", is_flag=True, help="Only list what would be copied.")
@engine_options()
@json_option
def command(
    run: str, remote: str, force: bool, dry_run: bool, engine: str | None, jobs: int | None, as_json: bool
) -> int:
    """Copy missing checkpoints, with their tags, from REMOTE to RUN, a run or a store.

    Every byte is verified on the way. After an interruption, repeat the command to continue. A run with another history is
    refused without --force. Exit code 1 if a checkpoint was damaged, or a tag was not moved.

    \b
    Examples:
      relight pull s3://bucket/runs/demo runs/
      relight pull /backup/demo runs/demo --dry-run
    """
    return exchange(remote, run, "pulled", force, dry_run, engine_of(engine, jobs), as_json)
