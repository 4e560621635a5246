"""``relight run``: run a training job as torchrun does, and keep it alive."""

from __future__ import annotations

import contextlib
import logging
import os
import shlex
import signal
import sys
import threading
from pathlib import Path

import click

from relight.cli.launched import LaunchCommand
from relight.cli.output import escape
from relight.observe import Event, flush_events, subscribe

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}


@click.command("run", cls=LaunchCommand, context_settings=_SETTINGS)
@click.option("--settings", type=click.Path(dir_okay=False, path_type=Path), help="Instead of ./relight.toml.")
@click.option("--incidents", type=click.Path(file_okay=False, path_type=Path), default="relight-incidents", show_default=True,
              help="Directory for incidents while the run's store is unknown.")  # fmt: skip
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN'S FLAGS] SCRIPT [ARGS]…")
def command(settings: Path | None, incidents: Path, arguments: tuple[str, ...]) -> int:
    """Run a training job as torchrun does, and keep it alive.

    Takes all of torchrun's flags. Instead of restarting a fixed number of times it diagnoses each failure, such as a process that ended or
    ranks that hang, and follows docs/recovery.md: it restarts at once, later, or from an older checkpoint, or stops if the script's error
    would only repeat. Each time it prints the reason, and writes an incident (relight incidents).

    Exit codes: 0 finished, 1 stopped, 75 ended on request with the last step stored, 76 ended on request without it, 77 this machine must
    not be used again.

    \b
    Examples:
      relight run --nproc-per-node 8 train.py --batch-size 32
      RELIGHT_JOB_SECRET=file:job.key relight run --nnodes 2:4 \\
        --rdzv-backend c10d --rdzv-endpoint head train.py
    """
    # before the imports, which take seconds: a save that is requested while no rank runs must not end this process
    signal.signal(signal.SIGUSR1, lambda *_: None)
    from relight.settings.environment import OTEL, text_of
    from relight.settings.file import PLACE, take_environment
    from relight.supervise.departing import ASKING
    from relight.supervise.launch import SAVED, UNSAVED, check_script, launch, parse
    from relight.supervise.settings import read_settings

    supervision = read_settings(settings)
    if settings is not None:
        os.environ[PLACE] = str(settings.resolve())  # the file may also have the script's own table
        take_environment()
    options = parse(list(arguments))
    check_script(options)
    logging.getLogger("relight").propagate = False
    logging.getLogger("relight").addHandler(logging.NullHandler())
    undo = subscribe(_print_event)
    traces = None
    if any(map(text_of, OTEL.values())):
        from relight.monitoring.trace_export import start_traces

        traces = start_traces(of_this_job=True)
    try:
        ended = launch(options, supervision, incidents)
    finally:
        if traces is not None:
            traces.close()
        undo()
    click.echo(f"relight: {escape(ended.message)}", err=True)
    if ended.code == 1:
        click.echo(f"relight: relight incidents {escape(shlex.quote(ended.where))} shows what happened", err=True)
    # after SAVED and UNSAVED, the machine may be gone before Python has exited, which takes seconds after torch
    if ended.code in (SAVED, UNSAVED) or _is_in_torch(ASKING):
        flush_events()
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
        sys.stderr.flush()
        os._exit(ended.code)
    return ended.code


def _is_in_torch(names: tuple[str, ...]) -> bool:
    """Return whether a thread of the rendezvous may still be in torch's C++: Python's exit would end the process by SIGABRT."""
    return any(thread.name in names for thread in threading.enumerate())


def _print_event(event: Event) -> None:
    shown = ("run.", "prediction.", "rendezvous.", "spare.", "agent.hung", "traces.")
    followed = ("run.hang", "prediction.scored")  # another event of the same cause follows
    if event.name.startswith(shown) and event.name not in followed:
        click.echo(f"relight: {escape(event.fields.get('message', event.name))}", err=True)
