"""``relight save``: request a save from a training job on any machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from textwrap import fill

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape

_WIDE = 84


@click.command("save")
@click.argument("path", metavar="RUN")
@click.option("--why", default="", metavar="TEXT", help="Purpose: part of the checkpoint's reason, after your name.")
@click.option(
    "--timeout",
    type=click.FloatRange(min=1),
    default=300.0,
    show_default=True,
    metavar="S",
    help="How long to wait for it.",
)
@json_option
def command(path: str, why: str, timeout: float, as_json: bool) -> int:
    """Request a save from a training job on any machine, and wait until the checkpoint exists.

    The request is a record of the run's log. relight run, which supervises the job, polls the log every 3 s and has all ranks save at
    the end of their step, as on SIGUSR1. Exit code 1 if no relight run acknowledges it within 20 s, the job cannot save, or the
    timeout is over. A request older than a minute is ignored.

    \b
    Examples:
      relight save runs/demo
      relight save s3://bucket/runs/demo --why "before the driver update"
    """
    from relight.audit.audit_log import user
    from relight.run_records.save_requests import Answer, ask_for_save, describe_outcome, wait_for_answer

    opened = open_run_at(path)
    began = time.monotonic()
    with _waiting() as show:
        seq = ask_for_save(opened.run.store, opened.run.name, user(), why)
        show(f"requested in record {seq}; relight run polls every 3 s")

        def report(answer: Answer) -> None:
            if not answer.over:
                show(f"acknowledged on {escape(answer.acknowledged_by)}; waiting for the save")

        answer = wait_for_answer(opened.run.store, opened.run.name, seq, timeout, report)
    waited, saved = time.monotonic() - began, answer.saved
    if as_json:
        saved_facts = {"id": saved.id, "step": saved.step, "reason": saved.body.reason} if saved is not None else {}
        ok = {
            "ok": saved is not None,
            "asked": seq,
            "heard": answer.acknowledged_by,
            "refused": answer.refused,
            "seconds": round(waited, 3),
        }
        emit_json({**ok, "id": None, "step": None, "reason": None, **saved_facts})
    else:
        click.echo(fill(escape(describe_outcome(answer, waited)), _WIDE))
    return 0 if saved is not None else 1


@contextmanager
def _waiting() -> Iterator[Callable[[str], object]]:
    """Print the state on standard error: on a terminal one line that disappears, otherwise a line for each state."""
    if not sys.stderr.isatty():
        yield lambda text: click.echo(text, err=True)
        return
    from rich.console import Console

    with Console(stderr=True, highlight=False).status("requesting") as status:
        yield status.update
