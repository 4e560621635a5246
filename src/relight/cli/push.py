"""``relight push``: copy missing checkpoints to another store; and the code that ``relight pull`` shares."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import engine_of, engine_options, json_option, open_run_at
from relight.cli.cp import changes_of, warn_of_change
from relight.cli.output import emit_json, escape, paint, warn
from relight.engines import Engine
from relight.errors import ConfigError
from relight.observe.progress_bar import progress_bar
from relight.transfer.pushing import PushPlan, PushReport, execute_push, plan_push
from relight.units import count_text, size_text


@click.command("push")
@click.argument("run")
@click.argument("remote")
@click.option("--force", is_flag=True, help="Also into a run with another history; also move tags there.")
@click.option("--dry-run", is_flag=True, help="Only list what would be copied.")
@engine_options()
@json_option
def command(
    run: str, remote: str, force: bool, dry_run: bool, engine: str | None, jobs: int | None, as_json: bool
) -> int:
    """Copy a run's missing checkpoints, with their tags, to REMOTE, a store or a run in one.

    Every byte is verified on the way. After an interruption, repeat the command to continue. A run with another history is
    refused without --force. Exit code 1 if a checkpoint was damaged, or a tag was not moved.

    \b
    Examples:
      relight push runs/demo s3://bucket/runs/
      relight push runs/demo /backup/demo --dry-run
    """
    return exchange(run, remote, "pushed", force, dry_run, engine_of(engine, jobs), as_json)


def exchange(
    source: str, destination: str, done: str, force: bool, dry_run: bool, engine: Engine, as_json: bool
) -> int:
    """Plan a push, print or execute the plan, and return the exit code. ``done``: "pushed" or "pulled"."""
    opened = open_run_at(source)
    if opened.which is not None:
        raise ConfigError(
            "a run is pushed or pulled as a whole", where=source, hint="relight cp copies single checkpoints"
        )
    place = locate_destination(destination, opened.run.name)
    assert place.run is not None
    plan = plan_push(opened.run, place.store, place.run, force=force)
    to = f"{place.store.url.rstrip('/')}/{place.run}"
    warn_of_change(plan.copy)
    if dry_run:
        if as_json:
            rows = [
                {"id": checkpoint.id, "step": checkpoint.step, "bytes": checkpoint.body.alone_bytes}
                for checkpoint in plan.copy.checkpoints
            ]
            facts = {
                "there": len(plan.copy.there),
                "tags": [move._asdict() for move in plan.tags],
                "changes": changes_of(plan.copy),
            }
            emit_json({"dry_run": True, "to": to, "copy": rows, **facts})
        else:
            for checkpoint in plan.copy.checkpoints:
                click.echo(f"{checkpoint.id}  step {checkpoint.step:<9}  {size_text(checkpoint.body.alone_bytes):>9}")
            tags = f", {count_text(len(plan.tags) - len(plan.refused), 'tag')}" if plan.tags else ""
            click.echo(
                f"{count_text(len(plan.copy.checkpoints), 'checkpoint')}, {size_text(plan.copy.bytes)}{tags}, "
                f"would be {done} to {escape(to)}"
            )
        return 0
    with engine, progress_bar(f"{done[:4]}ing", plan.copy.bytes) as meter:
        report = execute_push(plan, progress=meter, engine=engine)
    if as_json:
        emit_json({"to": to, **_facts(report), "changes": changes_of(plan.copy)})
    else:
        _print_result(plan, report, done, to)
    return 1 if report.copy.damaged or report.refused else 0


def _facts(report: PushReport) -> dict[str, Any]:
    damaged = [
        {"id": old, "kind": error.kind, "where": error.where, "detail": error.what}
        for old, error in report.copy.damaged
    ]
    return {
        "copied": [{"id": old, "id_there": new} for old, new in report.copy.copied],
        "there": len(report.copy.there),
        "damaged": damaged,
        "tags": [{"name": name, "id_there": id_there} for name, id_there in report.tagged],
        "refused": [move._asdict() for move in report.refused],
    }


def _print_result(plan: PushPlan, report: PushReport, done: str, to: str) -> None:
    for old, new in report.copy.copied:
        if old != new:
            click.echo(f"{old} is {new} there: its own id was taken")
    for old, error in report.copy.damaged:
        click.echo(f"{paint('DAMAGED', 'red')}  {old} was not copied: {escape(error.where)}: {escape(error.what)}")
    for move in report.refused:
        warn(f"tag {escape(move.name)} is on {move.there} there, and stays: --force moves it")
    if not report.copy.copied and not report.tagged and not report.copy.damaged:
        click.echo("everything is there already")
        return
    copied = {old for old, _ in report.copy.copied}
    count = sum(checkpoint.body.alone_bytes for checkpoint in plan.copy.checkpoints if checkpoint.id in copied)
    tags = f", {count_text(len(report.tagged), 'tag')}" if report.tagged else ""
    present = f"; {len(report.copy.there)} were there already" if report.copy.there else ""
    click.echo(
        f"{done} {count_text(len(report.copy.copied), 'checkpoint')}, {size_text(count)}{tags}, to {escape(to)}{present}"
    )
