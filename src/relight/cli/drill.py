"""``relight drill``: break a job on purpose, and check that it recovers."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import click

from relight.catalog.run import Run
from relight.cli.common import json_option, open_run_at
from relight.cli.launched import LaunchCommand
from relight.cli.output import Styled, emit_json, escape, since, table, warn
from relight.errors import ConfigError, RelightError
from relight.units import duration_text

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SECONDS = click.FloatRange(min=1)
ProgressCallback = Callable[[str, Any], None]


@click.command("drill", cls=LaunchCommand, context_settings=_SETTINGS)
@click.option("--only", metavar="NAMES", default="", help="Only these rehearsals, separated by commas.")
@click.option("--from", "source", metavar="RUN", default="", help="Begin with copies of this run's newest checkpoints.")
@click.option(
    "--env", multiple=True, metavar="NAME=VALUE", help="For the script; {store} in VALUE is the drill's store."
)
@click.option(
    "--settings", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="Instead of ./relight.toml."
)
@click.option("--max-lost-steps", type=click.IntRange(min=0), metavar="N", help="Fail if more steps are lost.")
@click.option(
    "--max-seconds", type=click.FloatRange(min=0), metavar="S", help="Fail if training takes longer to resume."
)
@click.option(
    "--timeout", type=_SECONDS, metavar="S", help="Limit of one rehearsal; by default from the job's own pace here."
)
@click.option(
    "--deadline", type=_SECONDS, default=3600.0, show_default=True, metavar="S", help="Limit of all rehearsals."
)
@click.option(
    "--report", type=click.Path(dir_okay=False, path_type=Path), help="Write the results to this file, as Markdown."
)
@click.option(
    "--remember",
    metavar="RUN",
    default="",
    help="Record the results with this run; by default that of --from or --live.",
)
@click.option("--history", metavar="RUN", default="", help="Only show the results recorded with this run.")
@click.option("--live", metavar="RUN", default="", help="Break the running job of this run, on this machine.")
@click.option(
    "--copy",
    "copies",
    metavar="RUN",
    default="",
    help="Only copies of this run's newest checkpoints: no job, no script.",
)
@click.option("--yes", is_flag=True, help="With --live: confirm.")
@click.option(
    "--keep",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep stores and logs in this new or empty directory.",
)
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[[TORCHRUN'S FLAGS] SCRIPT [ARGS]…]")
def command(
    only: str,
    source: str,
    env: tuple[str, ...],
    settings: Path | None,
    max_lost_steps: int | None,
    max_seconds: float | None,
    timeout: float | None,
    deadline: float,
    report: Path | None,
    remember: str,
    history: str,
    live: str,
    copies: str,
    yes: bool,
    keep: Path | None,
    as_json: bool,
    arguments: tuple[str, ...],
) -> int:
    """Break a job on purpose, and check that it recovers as docs/recovery.md describes.

    Kills, stops and crashes a rank, poisons the loss, fills the disk, takes the store away, damages the newest checkpoint, cuts a
    node's network, kills the agent and relight run, asks it to end. The drill starts SCRIPT itself: {store} in its arguments stands for
    the drill's own store, and the script's own store is not touched. Without SCRIPT, the drill uses a small training of its own.
    Exit code 1 if a rehearsal failed.

    With --live a rank of a running job is killed: --only kill, hang or preempt. With --copy no job is started: copies of the run's newest
    two checkpoints, in a directory of the drill's own, are verified, restored, damaged, pruned, and lose a file or half a record.

    \b
    Examples:
      relight drill
      relight drill --from runs/demo train.py --store {store}
      relight drill --live runs/demo --only hang --yes
      relight drill --copy runs/demo
    """
    from relight.drill import DrillOptions, run
    from relight.drill.record import remember as write_down
    from relight.drill.report import markdown
    from relight.drill.target import target_of

    if history:
        return _history(history, as_json)
    if live and (arguments or source or not yes):
        what = "takes no script and no --from" if yes else "breaks a real job"
        raise ConfigError(f"--live {what}", hint="relight drill --live RUN --yes")
    if copies and (arguments or source or live):
        raise ConfigError("--copy takes no script, no --from and no --live", hint="relight drill --copy RUN")
    if source and not arguments:
        raise ConfigError("--from needs a script: the drill's own job begins from scratch", hint="name the script")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    opened = {name: open_run_at(name, warnings=False).run for name in {source, live, copies, remember} - {""}}
    with _progress() as report_progress:
        options = DrillOptions(
            target=target_of(arguments, str(settings.resolve()) if settings is not None else "", env),
            only=[name.strip() for name in only.split(",") if name.strip()], source=opened.get(source), live=opened.get(live),
            copies=opened.get(copies), max_lost_steps=max_lost_steps, max_seconds=max_seconds,
            timeout_s=timeout, deadline_s=deadline, keep=keep, on_progress=report_progress,
        )  # fmt: skip
        done = run(options)
    _remember(opened.get(remember or live or copies or source), lambda run: write_down(run.store, run.name, done))
    if report is not None:
        report.write_text(markdown(done), encoding="utf-8")
    if as_json:
        emit_json(done.to_dict())
    else:
        _show(done)
    return 0 if done.ok else 1


def _end(number: int, frame: FrameType | None) -> None:
    """Handle a signal: end started processes and remove created files, as after Ctrl-C."""
    raise SystemExit(128 + number)


def _remember(run: Run | None, write: Callable[[Run], None]) -> None:
    """Record the results with the run. If that fails, warn only: the results are printed anyway."""
    if run is not None:
        try:
            write(run)
        except RelightError as error:
            warn(f"results not recorded with {escape(run.name)}: {escape(error)}")


@contextmanager
def _progress() -> Iterator[ProgressCallback]:
    """Print a line for each finished rehearsal on standard error; on a terminal also the one in progress."""
    if not sys.stderr.isatty():
        yield lambda name, outcome: click.echo(_line(outcome), err=True) if outcome is not None else None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def show(name: str, outcome: Any) -> None:
            if outcome is None:
                status.update(name)
            else:
                console.print(
                    f"{name}: [{_STYLES[outcome.verdict]}]{outcome.verdict}[/], {duration_text(outcome.took_s)}"
                )

        yield show


def _line(outcome: Any) -> str:
    return f"{outcome.name}: {outcome.verdict}, {duration_text(outcome.took_s)}"


def _show(done: Any) -> None:
    rows = [
        [
            outcome.name, Styled(outcome.verdict, _STYLES[outcome.verdict]),
            duration_text(outcome.noticed_s), duration_text(outcome.decided_s),
            duration_text(outcome.back_s), "–" if outcome.steps_lost is None else outcome.steps_lost,
        ]
        for outcome in done.outcomes
    ]  # fmt: skip
    table(["rehearsal", "", "noticed", "decided", "back", "lost"], rows, right=("noticed", "decided", "back", "lost"))
    for outcome in done.outcomes:
        if outcome.verdict != "passed":
            click.echo(f"{outcome.name} {outcome.verdict}: {escape(outcome.why)}")
    click.echo(done.summary())
    if done.kept:
        click.echo(f"stores and logs are in {escape(done.kept)}")


def _history(path: str, as_json: bool) -> int:
    """Show the recorded drills. The exit code is 1 if there are none."""
    from relight.drill.record import drills_of

    run = open_run_at(path, warnings=False).run
    drills = drills_of(run.store, run.name)
    if as_json:
        emit_json([drill.to_dict() for drill in drills])
    else:
        rows = [_row(drill) for drill in drills]
        table(["when", "host", "of", "came out", "failed"], rows, wrap=("failed",))
    return 0 if drills else 1


def _row(done: Any) -> list[object]:
    failed = [outcome.name for outcome in done.outcomes if outcome.verdict == "failed"]
    subject = "the job itself" if done.live else "checkpoints" if done.copies else "a copy"
    return [
        since(done.at),
        done.host,
        subject,
        Styled(done.summary(), "" if done.ok else "red"),
        ", ".join(failed) or "–",
    ]
