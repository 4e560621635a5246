"""``relight cp``: copy checkpoints to another store or run."""

from __future__ import annotations

import os
from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import engine_of, engine_options, json_option, open_run_at
from relight.cli.output import emit_json, escape, paint, warn
from relight.errors import ConfigError
from relight.observe.progress_bar import progress_bar
from relight.transfer import CopyPlan, CopyReport, execute_copy, plan_copy
from relight.units import count_text, size_text


@click.command("cp")
@click.argument("source", metavar="SOURCE[@WHICH]")
@click.argument("destination")
@click.option(
    "--which", multiple=True, help="A checkpoint: id, step, tag, 'latest', 'best' or 'best:METRIC'. Repeatable."
)
@click.option("--all", "everything", is_flag=True, help="All checkpoints of the run.")
@click.option("--force", is_flag=True, help="Copy into a run with another history: it will resume from the copy.")
@click.option("--dry-run", is_flag=True, help="Only list what would be copied.")
@engine_options()
@json_option
def command(
    source: str,
    destination: str,
    which: tuple[str, ...],
    everything: bool,
    force: bool,
    dry_run: bool,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Copy checkpoints, by default the newest, to DESTINATION: a store/run, which is made if needed, or a store.

    Every byte is verified on the way. A copy keeps its id if that is free, and its root records its origin. A job that trains
    at the destination is not disturbed. After an interruption, repeat the command to continue. Exit code 1 if a checkpoint
    was damaged: it is skipped, the others are copied.

    \b
    Examples:
      relight cp runs/demo@best /backup/demo
      relight cp runs/demo /backup/ --all
    """
    opened = open_run_at(source)
    if sum((everything, bool(which), opened.which is not None)) > 1:
        raise ConfigError("@WHICH, --which and --all exclude each other")
    chosen = (
        opened.history.live if everything else [opened.choose(selector) for selector in which] or [opened.choose(None)]
    )
    place = locate_destination(destination, opened.run.name)
    assert place.run is not None
    plan = plan_copy(
        opened.run,
        list({checkpoint.id: checkpoint for checkpoint in chosen}.values()),
        place.store,
        place.run,
        as_newest=force,
    )
    warn_of_change(plan)
    if dry_run:
        _print_plan(plan, as_json)
        return 0
    with engine_of(engine, jobs) as workers, progress_bar("copying", plan.bytes) as meter:
        report = execute_copy(plan, progress=meter, engine=workers)
    if as_json:
        emit_json({"to": _destination(plan), **_to_dict(report), "changes": changes_of(plan)})
    else:
        _print_report(plan, report)
    return 1 if report.damaged else 0


def warn_of_change(plan: CopyPlan) -> None:
    """Report on stderr, before anything is copied, what a forced copy changes at the destination."""
    change = plan.changes
    if change is None:
        return
    for checkpoint in change.only_there[:10]:
        warn(f"only {_destination_text(plan)} has step {checkpoint.step} ({checkpoint.id}); it stays")
    if len(change.only_there) > 10:
        warn(f"… and {len(change.only_there) - 10} more that the source has not; they stay")
    before, after = change.before, change.after
    warn(
        f"latest of {_destination_text(plan)}: step {before.step} ({before.id}) → step {after.step}, a copy of {after.id}"
    )


def changes_of(plan: CopyPlan) -> dict[str, Any] | None:
    """Return, for JSON, what a forced copy changes at the destination; None if its history continues."""
    change = plan.changes
    if change is None:
        return None
    return {
        "relation": change.relation, "latest_before": change.before.id, "latest_after": change.after.id,
        "only_there": [{"id": checkpoint.id, "step": checkpoint.step} for checkpoint in change.only_there],
    }  # fmt: skip


def _print_plan(plan: CopyPlan, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"id": checkpoint.id, "step": checkpoint.step, "bytes": checkpoint.body.alone_bytes}
        for checkpoint in plan.checkpoints
    ]
    if as_json:
        emit_json(
            {
                "dry_run": True,
                "to": _destination(plan),
                "copy": rows,
                "there": _pairs(plan.there),
                "changes": changes_of(plan),
            }
        )
        return
    for row in rows:
        click.echo(f"{row['id']}  step {row['step']:<9}  {size_text(row['bytes']):>9}")
    click.echo(
        f"{count_text(len(rows), 'checkpoint')}, {size_text(plan.bytes)}, would be copied "
        f"to {_destination_text(plan)}{_already_there(plan.there)}"
    )


def _print_report(plan: CopyPlan, report: CopyReport) -> None:
    for old, new in report.copied:
        if old != new:
            click.echo(f"{old} is {new} there: its own id was taken")
    for old, error in report.damaged:
        click.echo(f"{paint('DAMAGED', 'red')}  {old} was not copied: {escape(error.where)}: {escape(error.what)}")
    if report.there and not report.copied and not report.damaged:
        what = "it is" if len(report.there) == 1 else f"all {len(report.there)} are"
        click.echo(f"nothing to copy: {what} in {_destination_text(plan)} already")
        return
    copied = {old for old, _ in report.copied}
    count = sum(checkpoint.body.alone_bytes for checkpoint in plan.checkpoints if checkpoint.id in copied)
    click.echo(
        f"copied {count_text(len(report.copied), 'checkpoint')}, {size_text(count)}, "
        f"to {_destination_text(plan)}{_already_there(report.there)}"
    )


def _to_dict(report: CopyReport) -> dict[str, Any]:
    damaged = [
        {"id": old, "kind": error.kind, "where": error.where, "detail": error.what} for old, error in report.damaged
    ]
    return {"copied": _pairs(report.copied), "there": _pairs(report.there), "damaged": damaged}


def _pairs(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"id": old, "id_there": new} for old, new in pairs]


def _already_there(pairs: list[tuple[str, str]]) -> str:
    return f"; {len(pairs)} {'was' if len(pairs) == 1 else 'were'} there already" if pairs else ""


def _destination_text(plan: CopyPlan) -> str:
    """Return the destination for people: relative if it is below the working directory."""
    return escape(_destination(plan).removeprefix(f"{os.getcwd()}/"))


def _destination(plan: CopyPlan) -> str:
    return f"{plan.destination.url.rstrip('/')}/{plan.run}"
