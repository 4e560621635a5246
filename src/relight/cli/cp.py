"""``relight cp``: copy checkpoints to another store or run."""

from __future__ import annotations

import os
from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, paint, plural, progress, size, warn
from relight.errors import ConfigError
from relight.transfer import CopyPlan, CopyReport, execute_copy, plan_copy


@click.command("cp")
@click.argument("source", metavar="SOURCE[@WHICH]")
@click.argument("destination")
@click.option("--which", multiple=True, help="Which, again and again: an id, a step, a tag, 'latest', 'best' or 'best:METRIC'.")
@click.option("--all", "everything", is_flag=True, help="All checkpoints of the run.")
@click.option("--force", is_flag=True, help="Copy into a run with another history: it will resume from the copy.")
@click.option("--dry-run", is_flag=True, help="Only say what would be copied.")
@json_option
def command(source: str, destination: str, which: tuple[str, ...], everything: bool, force: bool, dry_run: bool, as_json: bool) -> int:
    """Copy checkpoints, by default the newest, to DESTINATION: a store/run, which is made if needed, or a store.

    Every byte is verified on the way. A copy keeps its id where that is free, and its root says where it came from. A
    training run at the destination goes on undisturbed. Said again after an interruption, it goes on where it was. Exit
    code 1 if one was damaged: it is left out, the others are copied.

    \b
    Examples:
      relight cp runs/demo@best /backup/demo
      relight cp runs/demo /backup/ --all
    """
    found = open_run_at(source)
    if sum((everything, bool(which), found.which is not None)) > 1:
        raise ConfigError("of @WHICH, --which and --all just one can be meant")
    chosen = found.history.live if everything else [found.choose(one) for one in which] or [found.choose(None)]
    place = locate_destination(destination, found.run.name)
    assert place.run is not None
    plan = plan_copy(found.run, list({one.id: one for one in chosen}.values()), place.store, place.run, as_newest=force)
    warn_of_change(plan)
    if dry_run:
        _print_plan(plan, as_json)
        return 0
    with progress("copying", plan.bytes) as meter:
        report = execute_copy(plan, progress=meter)
    if as_json:
        emit_json({"to": _to(plan), **_to_dict(report), "changes": changes_of(plan)})
    else:
        _print_report(plan, report)
    return 1 if report.damaged else 0


def warn_of_change(plan: CopyPlan) -> None:
    """Report on stderr, before anything is copied, what a forced copy changes at the destination."""
    found = plan.changes
    if found is None:
        return
    for one in found.only_there[:10]:
        warn(f"only {_shown(plan)} has step {one.step} ({one.id}); it stays")
    if len(found.only_there) > 10:
        warn(f"… and {len(found.only_there) - 10} more that the source has not; they stay")
    before, after = found.before, found.after
    warn(f"latest of {_shown(plan)}: step {before.step} ({before.id}) → step {after.step}, a copy of {after.id}")


def changes_of(plan: CopyPlan) -> dict[str, Any] | None:
    """For JSON: what a forced copy changes at the destination; None if its history continues."""
    found = plan.changes
    if found is None:
        return None
    return {
        "relation": found.relation, "latest_before": found.before.id, "latest_after": found.after.id,
        "only_there": [{"id": one.id, "step": one.step} for one in found.only_there],
    }  # fmt: skip


def _print_plan(plan: CopyPlan, as_json: bool) -> None:
    rows: list[dict[str, Any]] = [{"id": one.id, "step": one.step, "bytes": one.body.alone_bytes} for one in plan.checkpoints]
    if as_json:
        emit_json({"dry_run": True, "to": _to(plan), "copy": rows, "there": _pairs(plan.there), "changes": changes_of(plan)})
        return
    for row in rows:
        click.echo(f"{row['id']}  step {row['step']:<9}  {size(row['bytes']):>9}")
    click.echo(f"{plural(len(rows), 'checkpoint')}, {size(plan.bytes)}, would be copied to {_shown(plan)}{_there(plan.there)}")


def _print_report(plan: CopyPlan, report: CopyReport) -> None:
    for old, new in report.copied:
        if old != new:
            click.echo(f"{old} is {new} there: its own id was taken")
    for old, error in report.damaged:
        click.echo(f"{paint('DAMAGED', 'red')}  {old} was not copied: {escape(error.where)}: {escape(error.what)}")
    if report.there and not report.copied and not report.damaged:
        what = "it is" if len(report.there) == 1 else f"all {len(report.there)} are"
        click.echo(f"nothing to copy: {what} in {_shown(plan)} already")
        return
    copied = {old for old, _ in report.copied}
    count = sum(one.body.alone_bytes for one in plan.checkpoints if one.id in copied)
    click.echo(f"copied {plural(len(report.copied), 'checkpoint')}, {size(count)}, to {_shown(plan)}{_there(report.there)}")


def _to_dict(report: CopyReport) -> dict[str, Any]:
    damaged = [{"id": old, "kind": error.kind, "where": error.where, "detail": error.what} for old, error in report.damaged]
    return {"copied": _pairs(report.copied), "there": _pairs(report.there), "damaged": damaged}


def _pairs(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"id": old, "id_there": new} for old, new in pairs]


def _there(there: list[tuple[str, str]]) -> str:
    return f"; {len(there)} {'was' if len(there) == 1 else 'were'} there already" if there else ""


def _shown(plan: CopyPlan) -> str:
    """The destination for people: from here, if it is below here."""
    return escape(_to(plan).removeprefix(f"{os.getcwd()}/"))


def _to(plan: CopyPlan) -> str:
    return f"{plan.destination.url.rstrip('/')}/{plan.run}"
