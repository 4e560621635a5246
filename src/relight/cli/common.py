"""What several commands need: opening what was named, faults of the log as warnings."""

from __future__ import annotations

import click

from relight.catalog.find import resolve
from relight.catalog.locate import Place, locate
from relight.catalog.run import Run
from relight.cli.output import escape
from relight.errors import ConfigError
from relight.log import Checkpoint, History, View, fold

json_option = click.option("--json", "as_json", is_flag=True, help="Machine-readable output.")


def open_run_at(path: str) -> tuple[Run, View, History, Place]:
    """The run that ``path`` names; a store with several runs is bad usage."""
    place = locate(path)
    name = place.run
    if name is None:
        from relight.catalog.run import list_runs

        runs = list_runs(place.store)
        if len(runs) != 1:
            raise ConfigError(f"{path} is a store with {len(runs)} runs: name one", hint=", ".join(f"{path}/{run}" for run in runs[:8]))
        name = runs[0]
    run = Run(place.store, name)
    view = run.view()
    for fault in view.faults:
        click.echo(f"warning: {escape(fault.file)}: {escape(fault.reason)}; the record counts for nothing", err=True)
    return run, view, fold(view), place


def choose(history: History, place: Place, which: str | None, *, metric: str = "loss", mode: str = "min") -> Checkpoint:
    """The checkpoint meant: named by the path, by ``which``, or the newest."""
    return resolve(history, which or place.which or "latest", metric=metric, mode=mode)
