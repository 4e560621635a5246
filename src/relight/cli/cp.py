"""``relight cp``: copy a run, or some of its checkpoints, to another store or run."""

from __future__ import annotations

import os
from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import engine_of, engine_options, json_option, open_run_at
from relight.cli.output import emit_json, escape, paint, warn
from relight.errors import ConfigError
from relight.observe.progress_bar import progress_bar
from relight.transfer import CopyPlan, plan_copy
from relight.transfer.pushing import PushPlan, PushReport, execute_push, plan_push
from relight.units import count_text, size_text


@click.command("cp")
@click.argument("source", metavar="RUN[@WHICH]")
@click.argument("destination")
@click.option(
    "--which", multiple=True, help="A checkpoint: id, step, tag, 'latest', 'best' or 'best:METRIC'. Repeatable."
)
@click.option("--force", is_flag=True, help="Also into a run with another history, which will resume from the copy.")
@click.option("--dry-run", is_flag=True, help="Only list what would be copied.")
@engine_options()
@json_option
def command(
    source: str,
    destination: str,
    which: tuple[str, ...],
    force: bool,
    dry_run: bool,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Copy a run to DESTINATION: the checkpoints that it lacks, with their tags. RUN@WHICH and --which copy only the named checkpoints.

    DESTINATION is a store/run, which is made if needed, or a store. Either side may be a bucket. Every byte is verified on the way. A copy
    keeps its id if that is free, and its root records its origin. A job that trains at the destination is not disturbed. After an
    interruption, repeat the command to continue. A tag that names another checkpoint there stays, unless --force. Exit code 1 if a
    checkpoint was damaged, which is skipped, or a tag was not moved. Checkpoints that retention removes at the source meanwhile are left
    out.

    \b
    Examples:
      relight cp runs/demo s3://bucket/runs/
      relight cp s3://bucket/runs/demo runs/demo
      relight cp runs/demo@best /backup/demo
    """
    opened = open_run_at(source)
    if which and opened.which is not None:
        raise ConfigError("@WHICH and --which exclude each other")
    place = locate_destination(destination, opened.run.name)
    assert place.run is not None
    if which or opened.which is not None:
        chosen = {checkpoint.id: checkpoint for checkpoint in map(opened.choose, which or (None,))}
        copy = plan_copy(opened.run, list(chosen.values()), place.store, place.run, as_newest=force)
        plan = PushPlan(copy, [], force)
    else:
        plan = plan_push(opened.run, place.store, place.run, force=force)
    _warn_of_change(plan.copy)
    if dry_run:
        _print_plan(plan, as_json)
        return 0
    with engine_of(engine, jobs) as workers, progress_bar("copying", plan.copy.bytes) as meter:
        report = execute_push(plan, progress=meter, engine=workers)
    if as_json:
        emit_json({"to": _destination(plan.copy), **_to_dict(report), "changes": _changes(plan.copy)})
    else:
        _print_report(plan.copy, report)
    is_named = bool(which) or opened.which is not None
    return 1 if report.copy.damaged or report.refused or (is_named and report.copy.removed) else 0


def _warn_of_change(plan: CopyPlan) -> None:
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


def _changes(plan: CopyPlan) -> dict[str, Any] | None:
    """Return, for JSON, what a forced copy changes at the destination; None if its history continues."""
    change = plan.changes
    if change is None:
        return None
    return {
        "relation": change.relation, "latest_before": change.before.id, "latest_after": change.after.id,
        "only_there": [{"id": checkpoint.id, "step": checkpoint.step} for checkpoint in change.only_there],
    }  # fmt: skip


def _print_plan(plan: PushPlan, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [
        {"id": checkpoint.id, "step": checkpoint.step, "bytes": checkpoint.body.alone_bytes}
        for checkpoint in plan.copy.checkpoints
    ]
    if as_json:
        facts = {"there": _pairs(plan.copy.there), "tags": [move._asdict() for move in plan.tags]}
        emit_json(
            {"dry_run": True, "to": _destination(plan.copy), "copy": rows, **facts, "changes": _changes(plan.copy)}
        )
        return
    for row in rows:
        click.echo(f"{row['id']}  step {row['step']:<9}  {size_text(row['bytes']):>9}")
    click.echo(
        f"{count_text(len(rows), 'checkpoint')}, {size_text(plan.copy.bytes)}{_tags(len(plan.tags) - len(plan.refused))}, would be copied "
        f"to {_destination_text(plan.copy)}{_already_there(plan.copy.there)}"
    )


def _print_report(plan: CopyPlan, report: PushReport) -> None:
    for old, new in report.copy.copied:
        if old != new:
            click.echo(f"{old} is {new} there: its own id was taken")
    for old, error in report.copy.damaged:
        click.echo(f"{paint('DAMAGED', 'red')}  {old} was not copied: {escape(error.where)}: {escape(error.what)}")
    for old in report.copy.removed:
        warn(f"{old} was not copied: it was removed from the source meanwhile")
    for move in report.refused:
        warn(f"tag {escape(move.name)} is on {move.there} there, and stays: --force moves it")
    if not (report.copy.copied or report.copy.damaged or report.copy.removed or report.tagged):
        what = "it is" if len(report.copy.there) == 1 else f"all {len(report.copy.there)} are"
        click.echo(f"nothing to copy: {what} in {_destination_text(plan)} already")
        return
    copied = {old for old, _ in report.copy.copied}
    count = sum(checkpoint.body.alone_bytes for checkpoint in plan.checkpoints if checkpoint.id in copied)
    click.echo(
        f"copied {count_text(len(report.copy.copied), 'checkpoint')}, {size_text(count)}{_tags(len(report.tagged))}, "
        f"to {_destination_text(plan)}{_already_there(report.copy.there)}"
    )


def _tags(count: int) -> str:
    return f", {count_text(count, 'tag')}" if count else ""


def _to_dict(report: PushReport) -> dict[str, Any]:
    damaged = [
        {"id": old, "kind": error.kind, "where": error.where, "detail": error.what}
        for old, error in report.copy.damaged
    ]
    return {
        "copied": _pairs(report.copy.copied), "there": _pairs(report.copy.there), "damaged": damaged,
        "removed": report.copy.removed,
        "tags": [{"name": name, "id_there": id_there} for name, id_there in report.tagged],
        "refused": [move._asdict() for move in report.refused],
    }  # fmt: skip


def _pairs(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"id": old, "id_there": new} for old, new in pairs]


def _already_there(pairs: list[tuple[str, str]]) -> str:
    return f"; {len(pairs)} {'was' if len(pairs) == 1 else 'were'} there already" if pairs else ""


def _destination_text(plan: CopyPlan) -> str:
    """Return the destination for people: relative if it is below the working directory."""
    return escape(_destination(plan).removeprefix(f"{os.getcwd()}/"))


def _destination(plan: CopyPlan) -> str:
    return f"{plan.destination.url.rstrip('/')}/{plan.run}"
