"""``relight import --all``: import a whole directory of other frameworks' checkpoints."""

from __future__ import annotations

import os
from typing import Any

import click

from relight.catalog.locate import locate
from relight.cli.common import engine_of, engine_options, json_option
from relight.cli.output import emit_json, escape, paint, table
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.names import STORE_FILE
from relight.observe.progress_bar import progress_bar
from relight.store import open_bytes
from relight.store.durable import temporary_of
from relight.store.urls import absolute
from relight.units import count_text, duration_text, size_text

SHOWN = 20


@click.command("import --all")
@click.argument("old")
@click.argument("new")
@click.option("--run", metavar="NAME", help="The run for checkpoints directly in OLD; by default OLD's name.")
@click.option(
    "--check",
    default="10%",
    show_default=True,
    metavar="PART",
    help="Share that is read again and compared: 10%, full, none.",
)
@click.option(
    "--exclude",
    multiple=True,
    metavar="PATTERN",
    help="Skip matching files and folders: '*.bak', 'data/*'. Repeatable.",
)
@click.option("--compress", is_flag=True, help="Compress losslessly.")
@engine_options("processes")
@click.option("--dry-run", is_flag=True, help="Only list what would be imported or removed.")
@click.option("--roll-back", "back", is_flag=True, help="Remove what was imported from OLD, and nothing else.")
@json_option
def command(
    old: str,
    new: str,
    run: str | None,
    check: str,
    exclude: tuple[str, ...],
    compress: bool,
    engine: str | None,
    jobs: int | None,
    dry_run: bool,
    back: bool,
    as_json: bool,
) -> int:
    """Import all checkpoints below OLD, of any supported framework, into the store NEW: a run for each folder with checkpoints.

    OLD is a directory, or a prefix in a bucket, which is read in place. Several processes convert the checkpoints, which are
    committed in the order of their steps. After an interruption, repeat the command to continue; nothing is imported twice.
    Exit code 1 if a checkpoint could not be imported or differs, or if none was found. Unreadable files with a checkpoint's
    name (checkpoint-500, model.pt) are listed.

    \b
    Examples:
      relight import --all /old/checkpoints runs --dry-run
      relight import --all s3://bucket/old s3://bucket/runs --check full
      relight import --all /old/checkpoints runs --roll-back
    """
    from relight.migrate import execute_migration, plan_migration

    url = _store(new)
    if back:
        return _back(old, url, dry_run, as_json)
    plan = plan_migration(old, url, run=run, check=_part(check), compress=compress, exclude=exclude)
    if dry_run:
        _print_plan(plan, as_json)
        return 1 if plan.unreadable else 0
    with engine_of(engine, jobs, "processes") as workers, progress_bar("migrating", plan.bytes) as meter:
        report = execute_migration(plan, engine=workers, progress=meter)
    if as_json:
        emit_json(_facts(report, url))
        return 0 if report.ok else 1
    for source, _, what, hint in report.failed[:SHOWN]:
        click.echo(
            f"{paint('FAILED', 'red')}  {escape(source)}: {escape(what)}" + (f" → {escape(hint)}" if hint else "")
        )
    _print_unreadable(report.unreadable)
    for source, checkpoint_id, what in report.wrong[:SHOWN]:
        click.echo(f"{paint('WRONG', 'red')}  {checkpoint_id} of {escape(source)}: {escape(what)}")
    runs = len({checkpoint["run"] for checkpoint in report.brought})
    present = f"; {report.there} were there already" if report.there else ""
    brought = f"{count_text(len(report.brought), 'checkpoint')}, {size_text(report.bytes)}, brought to {count_text(runs, 'run')}"
    click.echo(f"{brought} in {duration_text(report.seconds)}{present}")
    same = "all the same" if not report.wrong else f"{len(report.wrong)} not the same"
    click.echo(f"{report.checked} compared with what they were made of: {same}")
    return 0 if report.ok else 1


def _facts(report: Any, url: str) -> dict[str, Any]:
    brought = [
        {key: checkpoint[key] for key in ("source", "run", "step", "id", "bytes")} for checkpoint in report.brought
    ]
    failed = [dict(zip(("source", "error", "what", "hint"), row, strict=True)) for row in report.failed]
    wrong = [dict(zip(("source", "id", "what"), row, strict=True)) for row in report.wrong]
    return {
        "ok": report.ok, "to": url, "brought": brought, "there": report.there, "failed": failed, "unreadable": _pairs(report.unreadable),
        "checked": report.checked, "wrong": wrong, "bytes": report.bytes, "seconds": report.seconds,
    }  # fmt: skip


def _store(new: str) -> str:
    """Return the URL of the store NEW, which may not exist yet."""
    url = absolute(new)
    try:
        place = locate(new)
    except CheckpointNotFound:
        # a killed migration may have left the file's temporary name
        if any(STORE_FILE not in (entry.name, temporary_of(entry.name)) for entry in open_bytes(url).list("")):
            raise ConfigError(
                "this exists, and is not a store", where=new, hint="name a new directory: it becomes a store"
            ) from None
        return url
    if place.run is not None:
        raise ConfigError("this is a run: a migration makes its own", where=new, hint="name the store")
    return url


def _part(check: str) -> float:
    words = {"full": 1.0, "none": 0.0}
    try:
        share = words[check] if check in words else float(check.removesuffix("%")) / 100
    except ValueError:
        share = -1.0
    if not 0 <= share <= 1:
        raise ConfigError(f"--check {check!r} is invalid", hint="10%, full or none")
    return share


def _print_plan(plan: Any, as_json: bool) -> None:
    if as_json:
        rows = [
            {
                "source": item.name,
                "run": item.run,
                "step": item.step,
                "format": item.format,
                "bytes": item.bytes,
                "tensors": item.tensors,
            }
            for item in plan.todo
        ]
        emit_json(
            {
                "dry_run": True,
                "to": plan.url,
                "bring": rows,
                "there": len(plan.there),
                "unreadable": _pairs(plan.unreadable),
            }
        )
        return
    if plan.todo:
        rows_ = [(item.run, item.step, size_text(item.bytes), item.format, item.name) for item in plan.todo]
        table(("run", "step", "size", "format", "from"), rows_, right=("step", "size"), wrap=("from",))
    _print_unreadable(plan.unreadable)
    present = f"; {len(plan.there)} are there already" if plan.there else ""
    click.echo(
        f"{count_text(len(plan.todo), 'checkpoint')}, {size_text(plan.bytes)}, would be brought "
        f"to {count_text(len(plan.runs), 'run')}{present}"
    )


def _print_unreadable(unreadable: list[tuple[str, str]]) -> None:
    for source, why in unreadable[:SHOWN]:
        click.echo(f"{paint('UNREADABLE', 'red')}  {escape(source)}: {escape(why)}")
    if len(unreadable) > SHOWN:
        click.echo(f"… and {len(unreadable) - SHOWN} more: --json lists them")


def _pairs(pairs: list[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"source": source, "why": why} for source, why in pairs]


def _back(old: str, url: str, dry_run: bool, as_json: bool) -> int:
    from relight.migrate import roll_back

    report = roll_back(old, url, dry_run=dry_run)
    count = sum(map(len, report.gone.values()))
    if as_json:
        kept = [{"id": checkpoint_id, "why": why} for checkpoint_id, why in report.kept]
        emit_json({"dry_run": dry_run, "to": url, "gone": report.gone, "kept": kept, "left": report.left})
    else:
        for checkpoint_id, why in report.kept:
            click.echo(f"{checkpoint_id} stays: {escape(why)}")
        shown = escape(url.removeprefix(f"{os.getcwd()}/"))
        click.echo(f"{count_text(count, 'checkpoint')} {'would be ' if dry_run else ''}taken back out of {shown}")
    return 1 if report.kept else 0
