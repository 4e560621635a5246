"""``relight export --follow``: keep an export at the newest checkpoint of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click

from relight.cli.common import engine_of, engine_options, json_option
from relight.cli.export import export_options, options_of, print_report
from relight.cli.followed import follow_options, followed
from relight.cli.output import escape, warn
from relight.engines import Engine
from relight.errors import CheckpointNotFound, CorruptCheckpoint, RelightError, StoreUnavailable, UnsafeContent
from relight.export.newest import NewestExport, NewestVersion
from relight.export.plan import facts
from relight.export.selection import Options
from relight.importers.hub import hub_address, hub_library, is_hub
from relight.log import History
from relight.observe.progress_bar import progress_bar
from relight.reader.opened import Opened


@click.command("export --follow")
@click.argument("path", metavar="RUN")
@click.argument("target")
@export_options
@click.option(
    "--files", type=click.Path(file_okay=False), metavar="DIR", help="Copy DIR's files into each export: config.json …"
)
@click.option("--public", is_flag=True, help="A new repository of the Hub is public; by default it is private.")
@follow_options
@engine_options()
@json_option
def command(
    path: str,
    target: str,
    to: str | None,
    shard: str | None,
    component: str | None,
    everything: bool,
    only: tuple[str, ...],
    rename: tuple[str, ...],
    dtype: str | None,
    tied: str,
    files: str | None,
    public: bool,
    which: str,
    nth: int,
    until: int | None,
    forever: bool,
    idle: str | None,
    every_s: float,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Keep TARGET at the newest checkpoint of a run, until the run is finished.

    TARGET is replaced atomically: a reader sees a whole export of one checkpoint. A directory is a symbolic link to a version in
    .TARGET.versions; the version before is kept, too. A repository of the Hub gets a commit for each checkpoint.

    \b
    Examples:
      relight export --follow runs/demo model.safetensors
      relight export --follow runs/demo served/ --files config --which best
    """
    options = options_of(target, to, shard, component, everything, only, rename, dtype, tied, overwrite=True)
    source = followed(path, which, nth, until, forever, idle, every_s)
    done = set[str]()
    failed = set[str]()
    silent = False
    with ExitStack() as stack:
        workers = stack.enter_context(engine_of(engine, jobs))
        export = (
            _to_hub(target, options, public, workers)
            if is_hub(target)
            else _to_disk(target, options, files, workers, stack, done)
        )
        for checkpoint in source.checkpoints(
            lambda history: _good(done, history) if which == "latest" else done, failed
        ):
            try:
                exported = export(source.run.open(checkpoint))
            except RelightError as error:
                if isinstance(error, StoreUnavailable) and error.retryable:
                    if not silent:
                        warn(f"{escape(str(error))}; step {checkpoint.step} is exported later")
                    silent = True
                    source.ending.stopping.wait(every_s)
                elif isinstance(error, (CheckpointNotFound, CorruptCheckpoint, UnsafeContent)):
                    warn(f"step {checkpoint.step} ({checkpoint.id}) is not exported: {escape(str(error))}")
                    failed.add(checkpoint.id)
                else:
                    raise
                continue
            silent = False
            done.clear()  # a tag or best: may return to an earlier checkpoint
            done.add(checkpoint.id)
            _print(exported, as_json)


def _good(done: set[str], history: History) -> set[str]:
    """Return the checkpoint that the target has, without one that is set aside or removed: an older one must then replace it."""
    return {each for each in done if history.find(each) is not None and each not in history.rolled_back_ids}


def _to_disk(
    target: str, options: Options, files: str | None, engine: Engine, stack: ExitStack, done: set[str]
) -> Callable[[Opened], NewestVersion]:
    """Return the function that exports a checkpoint to a file or directory. Add to ``done`` the checkpoint that a directory has."""
    destination = stack.enter_context(NewestExport(target, options, files))
    if destination.checkpoint_id is not None:
        done.add(destination.checkpoint_id)

    def export(opened: Opened) -> NewestVersion:
        with progress_bar("exporting", opened.checkpoint.body.logical_bytes) as meter:
            exported = destination.export(opened, meter, engine=engine)
        return exported._replace(plan=replace(exported.plan, path=target))

    return export


def _to_hub(target: str, options: Options, public: bool, engine: Engine) -> Callable[[Opened], NewestVersion]:
    """Return the function that commits an export to a repository of the Hub."""
    from relight.export.hub import export_to_hub

    hub_library()  # raises now, not at the first checkpoint
    address = hub_address(target)

    def export(opened: Opened) -> NewestVersion:
        with progress_bar("exporting", opened.checkpoint.body.logical_bytes) as meter:
            report = export_to_hub(opened, address, options, private=not public, progress=meter, engine=engine)
        return NewestVersion(replace(report.plan, path=str(address)), report.export)

    return export


def _print(exported: NewestVersion, as_json: bool) -> None:
    if not as_json:
        print_report(exported.plan, exported.report)
        return
    more: dict[str, Any] = {"overflowed": exported.report.overflowed, "seconds": exported.report.seconds}
    click.echo(json.dumps({**facts(exported.plan), **more}))
