"""``relight drill``: break a job on purpose, and see whether it goes on as it should."""

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
from relight.cli.output import Styled, age, emit_json, escape, table, warn
from relight.errors import ConfigError, RelightError

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_STYLES = {"passed": "green", "failed": "red", "skipped": "yellow"}
_SECONDS = click.FloatRange(min=1)
Say = Callable[[str, Any], None]


@click.command("drill", cls=LaunchCommand, context_settings=_SETTINGS)
@click.option("--only", metavar="NAMES", default="", help="Of the rehearsals these, parted by commas.")
@click.option("--from", "source", metavar="RUN", default="", help="Begin with copies of this run's newest checkpoints.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="For the script; {store} in VALUE is the drill's store.")
@click.option("--settings", type=click.Path(dir_okay=False, exists=True, path_type=Path), help="Instead of ./relight.toml.")
@click.option("--max-lost-steps", type=click.IntRange(min=0), metavar="N", help="More than that fails.")
@click.option("--max-seconds", type=click.FloatRange(min=0), metavar="S", help="So long until training goes on; longer fails.")
@click.option("--timeout", type=_SECONDS, metavar="S", help="For one rehearsal; else by what the job takes here.")
@click.option("--deadline", type=_SECONDS, default=3600.0, show_default=True, metavar="S", help="For all of them.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write what came of it here, as Markdown.")
@click.option("--remember", metavar="RUN", default="", help="With which run; --from and --live say so, too.")
@click.option("--history", metavar="RUN", default="", help="Only show what is remembered with this run.")
@click.option("--live", metavar="RUN", default="", help="Do it to the job of this run that is under way here.")
@click.option("--copy", "copies", metavar="RUN", default="", help="Only copies of this run's newest checkpoints: no job, no script.")
@click.option("--yes", is_flag=True, help="With --live: that it is meant.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Leave stores and logs here.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[[TORCHRUN'S FLAGS] SCRIPT [ARGS]…]")
def command(
    only: str, source: str, env: tuple[str, ...], settings: Path | None, max_lost_steps: int | None, max_seconds: float | None,
    timeout: float | None, deadline: float, report: Path | None, remember: str, history: str, live: str, copies: str, yes: bool,
    keep: Path | None, as_json: bool, arguments: tuple[str, ...],
) -> int:  # fmt: skip
    """Break a job on purpose, and see whether it goes on as docs/recovery.md says.

    Kills, stops and crashes a rank, poisons the loss, fills the disk, takes the store away, damages the newest checkpoint, cuts a
    node's network, kills the agent and relight run, asks it to end. With SCRIPT it is done to that, started anew by the drill: {store}
    in its arguments stands for the drill's own store, and its own is not touched. Without, to a small training that the drill brings.
    Exit code 1 if something failed.

    With --live a rank of a running job is killed: --only kill, hang or preempt. With --copy nothing is started: copies of its newest
    two checkpoints are verified, restored, damaged, robbed of a file, of half a record, and pruned, in a directory of the drill's own.

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
        what = "takes no script and no --from" if yes else "does what it does to a job that runs in earnest"
        raise ConfigError(f"--live {what}", hint="relight drill --live RUN --yes")
    if copies and (arguments or source or live):
        raise ConfigError("--copy takes no script, no --from and no --live", hint="relight drill --copy RUN")
    if source and not arguments:
        raise ConfigError("--from is for a script of yours: the job that the drill brings begins by itself", hint="name the script")
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _end)
    opened = {name: open_run_at(name, warnings=False).run for name in {source, live, copies, remember} - {""}}
    with _progress() as say:
        options = DrillOptions(
            target=target_of(arguments, str(settings.resolve()) if settings is not None else "", env),
            only=[one.strip() for one in only.split(",") if one.strip()], source=opened.get(source), live=opened.get(live),
            copies=opened.get(copies), max_lost_steps=max_lost_steps, max_seconds=max_seconds,
            timeout_s=timeout, deadline_s=deadline, keep=keep, say=say,
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
    """What was started is ended, and what was made removed, as behind Ctrl-C."""
    raise SystemExit(128 + number)


def _remember(run: Run | None, write: Callable[[Run], None]) -> None:
    """What was shown is shown, whether or not it can be written down."""
    if run is not None:
        try:
            write(run)
        except RelightError as error:
            warn(f"not remembered with {escape(run.name)}: {escape(error)}")


@contextmanager
def _progress() -> Iterator[Say]:
    """A line for each as it is done, on standard error; on a terminal also what is being done."""
    if not sys.stderr.isatty():
        yield lambda name, outcome: click.echo(_line(outcome), err=True) if outcome is not None else None
        return
    from rich.console import Console

    console = Console(stderr=True, highlight=False)
    with console.status("starting") as status:

        def say(name: str, outcome: Any) -> None:
            if outcome is None:
                status.update(name)
            else:
                console.print(f"{name}: [{_STYLES[outcome.verdict]}]{outcome.verdict}[/], {outcome.took_s:.0f} s")

        yield say


def _line(outcome: Any) -> str:
    return f"{outcome.name}: {outcome.verdict}, {outcome.took_s:.0f} s"


def _show(done: Any) -> None:
    from relight.drill.report import seconds_text

    rows = [
        [
            one.name, Styled(one.verdict, _STYLES[one.verdict]), seconds_text(one.noticed_s), seconds_text(one.decided_s),
            seconds_text(one.back_s), "–" if one.steps_lost is None else one.steps_lost,
        ]
        for one in done.outcomes
    ]  # fmt: skip
    table(["rehearsal", "", "noticed", "decided", "back", "lost"], rows, right=("noticed", "decided", "back", "lost"))
    for one in done.outcomes:
        if one.verdict != "passed":
            click.echo(f"{one.name} {one.verdict}: {escape(one.why)}")
    click.echo(done.summary())
    if done.kept:
        click.echo(f"stores and logs are in {escape(done.kept)}")


def _history(path: str, as_json: bool) -> int:
    """What is remembered. No drill yet is a no."""
    from relight.drill.record import drills_of

    run = open_run_at(path, warnings=False).run
    found = drills_of(run.store, run.name)
    if as_json:
        emit_json([one.to_dict() for one in found])
    else:
        rows = [_row(one) for one in found]
        table(["when", "host", "of", "came out", "failed"], rows, wrap=("failed",))
    return 0 if found else 1


def _row(done: Any) -> list[object]:
    failed = [one.name for one in done.outcomes if one.verdict == "failed"]
    of = "the job itself" if done.live else "checkpoints" if done.copies else "a copy"
    return [age(done.at), done.host, of, Styled(done.summary(), "" if done.ok else "red"), ", ".join(failed) or "–"]
