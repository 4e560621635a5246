"""``relight log --rebuild``: rebuild a run's log from its checkpoint directories."""

from __future__ import annotations

import click

from relight.catalog.locate import locate
from relight.cli.common import confirmed, json_option
from relight.cli.output import emit_json, escape, table, warn
from relight.errors import ConfigError
from relight.observe.progress_bar import progress_bar
from relight.reclaim import RebuildPlan, execute_rebuild, plan_rebuild
from relight.units import count_text


@click.command("log --rebuild")
@click.argument("path")
@click.option("--verify", is_flag=True, help="Read every byte of the checkpoints to list again, not only sizes.")
@click.option("--dry-run", is_flag=True, help="Only show what would be appended.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@json_option
def command(path: str, verify: bool, dry_run: bool, yes: bool, as_json: bool) -> int:
    """Rebuild a run's log, or its newest records, from the run's checkpoint directories.

    For a run whose log/ was lost: copied without it, or cleaned up. Each whole checkpoint that no record lists is listed again. Nothing is
    deleted. Tags, holds and notes are lost with the log; what retention had retired and not deleted yet is back. Stop jobs that save to the
    run first.

    \b
    Examples:
      relight log runs/demo --rebuild --dry-run
      relight log runs/demo --rebuild --verify --yes
    """
    place = locate(path)
    if place.run is None or place.which:
        raise ConfigError(
            "a log belongs to a run, not to a store or a checkpoint", where=path, hint="relight log STORE/RUN --rebuild"
        )
    with progress_bar("verifying", 0) as meter:
        plan = plan_rebuild(place.store, place.run, verify=verify, progress=meter if verify else None)
    if not as_json:
        _show(plan)
    doing = plan.is_needed and not dry_run
    doing = doing and confirmed(
        "Append them?", "appends records to the log", yes, as_json, ", or --dry-run to see them"
    )
    report = execute_rebuild(plan, place.store) if doing else None
    if as_json:
        emit_json({**plan.to_dict(), "dry_run": dry_run, "committed": report.committed if report else []})
    elif report is not None:
        click.echo(
            f"rebuilt: the log lists {count_text(len(report.committed), 'checkpoint')} again, in {count_text(report.records, 'record')}"
        )
        warn("tags, holds and notes were lost with the log: set them again (relight tag, relight tag --hold)")
    elif plan.is_needed:
        click.echo("dry run: nothing was done" if dry_run else "nothing was done")
    return 0


def _show(plan: RebuildPlan) -> None:
    rows: list[list[object]] = [[directory.name, directory.step, "listed again", ""] for directory in plan.commits]
    rows += [[directory.name, directory.step, "left alone", directory.why] for directory in plan.left]
    if rows:
        table(["directory", "step", "fate", "because"], rows, right=("step",), wrap=("because",))
    if not plan.is_needed:
        click.echo(f"the log of run {escape(plan.run)} lacks nothing that could be added")
