"""Helpers of several commands: open the named run, print faults of its log as warnings."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import click

from relight.catalog.find import choose
from relight.catalog.locate import Location, locate
from relight.catalog.run import Run, list_runs
from relight.cli.output import escape, warn
from relight.engines import ENGINES, Engine
from relight.errors import CheckpointNotFound, ConfigError, CorruptCheckpoint, RelightError
from relight.log import Checkpoint, History, LogView, fold
from relight.observe import write_events

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


def plot_option(help: str) -> Callable[[Any], Any]:
    """Return the decorator that adds ``--plot PNG`` to a command, for ``drawn``. Without matplotlib the option is refused at once."""
    return click.option(
        "--plot", type=click.Path(dir_okay=False, path_type=Path), metavar="PNG", callback=_needs_matplotlib, help=help
    )


def _needs_matplotlib(context: click.Context, option: click.Parameter, path: Path | None) -> Path | None:
    if path is not None and importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("--plot needs matplotlib", hint="pip install matplotlib, or leave --plot out")
    return path


def drawn(path: Path) -> None:
    """Report on stderr that the chart of ``--plot`` is in ``path``."""
    click.echo(f"the picture is in {escape(path)}", err=True)


def confirmed(question: str, effect: str, yes: bool, as_json: bool, instead: str) -> bool:
    """Ask the user, unless ``yes``. Raise ``ConfigError`` where no user can answer; ``instead`` is the hint about the other option."""
    if not yes and (as_json or not sys.stdin.isatty()):
        raise ConfigError(f"this {effect}, and cannot ask here", hint=f"give --yes{instead}")
    return yes or click.confirm(question, err=True)


def engine_options(default: str = "local") -> Callable[[Any], Any]:
    """Return the decorator that adds ``--engine`` and ``--jobs`` to a command. ``engine_of`` reads their values."""
    shown = f"Where tasks run: {', '.join(ENGINES[:-1])} or {ENGINES[-1]}; by default {default}" + (
        ", or processes with --jobs." if default == "local" else "."
    )

    def add(command: Any) -> Any:
        jobs = click.option(
            "--jobs",
            type=click.IntRange(1, 4096),
            metavar="N",
            help="Tasks at once; by default one for each core (local: 1).",
        )
        return click.option("--engine", type=click.Choice(ENGINES), metavar="|".join(ENGINES), help=shown)(
            jobs(command)
        )

    return add


def engine_of(engine: str | None, jobs: int | None, default: str = "local") -> Engine:
    """Return the engine that the options name."""
    if engine == "local" and (jobs or 1) > 1:
        raise ConfigError(f"--engine local runs one task at a time, and --jobs is {jobs}", hint="--engine processes")
    return Engine(engine or ("processes" if (jobs or 1) > 1 else default), jobs)


def keep_events(place_url: str, run: str) -> None:
    """Write this command's events where monitors of the run read them. Its log is silenced: the command prints its own output."""
    logging.getLogger("relight").addHandler(logging.NullHandler())
    write_events(place_url, run, role="command")


class OpenedRun(NamedTuple):
    """A run with its log and history. ``which``: the checkpoint that the path itself names, if any."""

    run: Run
    view: LogView
    history: History
    which: str | None

    def choose(self, which: str | None) -> Checkpoint:
        """Return the checkpoint that ``which``, else the path, names, else the newest. Print on stderr which metric decided, if any."""
        text = which or self.which or "latest"
        try:
            chosen = choose(self.history, text)
        except CheckpointNotFound as error:
            raise self._elsewhere(text) or error from None
        if chosen.by is not None:
            click.echo(escape(f"{self.run.name}: {chosen.explanation}"), err=True)
        return chosen.checkpoint

    def _elsewhere(self, text: str) -> CheckpointNotFound | None:
        """Return the error that names the further tier with a checkpoint that this log lacks; None if no tier has it."""
        from relight.catalog.tiers import open_tier, read_tier, tiers_of
        from relight.store.wrapper import guard_of

        for tier in tiers_of(self.history):
            with contextlib.suppress(RelightError):
                history = read_tier(tier.name, *open_tier(tier, guard_of(self.run.store))).history
                checkpoint = choose(history, text).checkpoint
                hint = f"it is on tier {tier.name}: {tier.url}@{checkpoint.id}"
                return CheckpointNotFound(f"no checkpoint {text[:80]!r} on the nearest tier", hint=hint)
        return None


def open_run_at(path: str, *, warnings: bool = True) -> OpenedRun:
    """Open the run that ``path`` names, or the only run of the store that it names."""
    place = locate(path)
    name = place.run
    if name is None:
        runs = list_runs(place.store)
        if len(runs) != 1:
            shown = ", ".join(f"{path.rstrip('/')}/{run}" for run in runs[:8])
            raise ConfigError(
                f"{path} is a store with {len(runs)} runs: which one?", hint=shown or "nothing was saved here yet"
            )
        name = runs[0]
    return read_run(place._replace(run=name), name, warnings=warnings)


def read_run(place: Location, name: str, *, warnings: bool = True) -> OpenedRun:
    """Open the run ``name`` of a store. Print a warning on stderr for each damaged record of its log."""
    run = Run(place.store, name)
    view = run.view()
    if warnings:
        for fault in view.faults[:20]:
            warn(f"{escape(fault.file)}: {escape(fault.reason)}; this log record is ignored")
        if len(view.faults) > 20:
            warn(f"… and {len(view.faults) - 20} more damaged records: relight log shows them")
        try:
            run.require_whole_log()
        except CorruptCheckpoint as error:
            warn(f"{escape(error.what)}; {escape(error.hint)}")
    return OpenedRun(run, view, fold(view), place.which)
