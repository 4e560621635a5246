"""``relight run``: run a training job as torchrun does, and keep it alive."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

import click

from relight.cli.launched import LaunchCommand
from relight.cli.output import escape
from relight.observe import Event, subscribe

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("run", cls=LaunchCommand, context_settings=_SETTINGS)
@click.option("--settings", type=click.Path(dir_okay=False, path_type=Path), help="Instead of ./relight.toml.")
@click.option("--incidents", type=click.Path(file_okay=False, path_type=Path), default="relight-incidents", show_default=True,
              help="Where incidents go while the run's store is not known.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN'S FLAGS] SCRIPT [ARGS]…")
def command(settings: Path | None, incidents: Path, arguments: tuple[str, ...]) -> int:
    """Run a training job as torchrun does, and keep it alive.

    Takes torchrun's flags, all of them. Instead of restarting a number of times it looks at what happened: a process that ended, ranks
    that no longer move, and does what docs/recovery.md says: goes on at once, later, from further back, or stops, as an error of the
    script would only repeat. Every time it says why, and writes an incident (relight incidents).

    Exit codes: 0 finished, 1 stopped, 75 ended as asked with the last step stored, 76 ended as asked without, 77 this machine is not to be
    used again.

    \b
    Examples:
      relight run --nproc-per-node 8 train.py --batch-size 32
      RELIGHT_JOB_SECRET=file:job.key relight run --nnodes 2:4 \\
        --rdzv-backend c10d --rdzv-endpoint head train.py
    """
    from relight.settings.file import PLACE, take_environment
    from relight.supervise.launch import SAVED, UNSAVED, launch, parse
    from relight.supervise.settings import read_settings

    told = read_settings(settings)
    if settings is not None:
        os.environ[PLACE] = str(settings.resolve())  # the script's own table is in it, too
        take_environment()
    options = parse(list(arguments))
    logging.getLogger("relight").propagate = False
    logging.getLogger("relight").addHandler(logging.NullHandler())
    undo = subscribe(_print_event)
    try:
        ended = launch(options, told, incidents)
    finally:
        undo()
    click.echo(f"relight: {escape(ended.say)}", err=True)
    if ended.code == 1:
        click.echo(f"relight: relight incidents {escape(ended.where)} shows what happened", err=True)
    if ended.code in (SAVED, UNSAVED):  # Python takes seconds to end behind torch, and the machine may be gone by then
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)
    return ended.code


def _print_event(event: Event) -> None:
    shown = ("run.", "prediction.", "rendezvous.", "spare.", "agent.hung")
    followed = ("run.hang", "prediction.scored")  # another event of the same cause follows
    if event.name.startswith(shown) and event.name not in followed:
        click.echo(f"relight: {escape(event.fields.get('say', event.name))}", err=True)
