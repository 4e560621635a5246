"""``relight verify --repair``: read every byte again, and repair damage from another tier."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

import click

from relight.catalog.locate import locate
from relight.cli.common import engine_of, engine_options, json_option, keep_events
from relight.cli.output import emit_json, escape, paint
from relight.drain.mirror_scrub import RebuiltDrives
from relight.drain.outwards import residency
from relight.drain.scrub import scrub
from relight.errors import ConfigError
from relight.observe import emit
from relight.observe.progress_bar import progress_bar
from relight.settings.amounts import bytes_of
from relight.store.mirror_drives import COPIES
from relight.store.mirror_rebuild import mirrored_in
from relight.units import count_text, size_text


@click.command("verify --repair")
@click.argument("path")
@click.option("--rate", metavar="SIZE", help="Largest rate of reading, in bytes a second: 50MB.")
@click.option(
    "--new-drive",
    "new_drives",
    multiple=True,
    metavar="DIRECTORY",
    help="A mirrored store's directory on a drive that replaces a lost one. Repeatable.",
)
@click.option("--dry-run", "no_repair", is_flag=True, help="Only list what is damaged.")
@engine_options()
@json_option
def command(
    path: str,
    rate: str | None,
    new_drives: tuple[str, ...],
    no_repair: bool,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Read every byte of a run again, in all of its tiers, and repair damage in one tier from another.

    Repaired bytes are checked against the committed hashes; nothing else of the run changes. Exit code 1 if bytes are damaged in all tiers,
    were not repaired because of --dry-run, or could not be read. Of a mirrored store (stripe:mirrors=2,…) both copies are read, and its
    drives are rebuilt.

    \b
    Examples:
      relight verify /nvme/ckpts/demo --repair
      relight verify /nvme/ckpts/demo --repair --rate 50MB
      relight verify stripe:mirrors=2,/nvme0/ckpts,/nvme1/ckpts,/demo --repair \\
        --new-drive /nvme1/ckpts
    """
    place = locate(path)
    if place.run is None or place.which is not None:
        raise ConfigError(
            "a repair needs a run, not a store or a checkpoint", where=path, hint="relight verify STORE/RUN --repair"
        )
    _, merged, _ = residency(place.store, place.run)
    total = sum(copy.checkpoint.body.stored_bytes for copies in merged.copies.values() for copy in copies)
    if new_drives and mirrored_in(place.store) is None:
        raise ConfigError(
            "--new-drive is for mirrored stores",
            where=place.store.url,
            hint="stripe:mirrors=2,/nvme0/ckpts,/nvme1/ckpts,/demo",
        )
    if mirrored_in(place.store) is not None:
        total *= COPIES
    limit = None if rate is None else float(bytes_of(rate, "--rate"))
    keep_events(place.store.url, place.run)
    with engine_of(engine, jobs) as workers, progress_bar("reading", total) as meter:
        report = scrub(
            place.store,
            place.run,
            repair=not no_repair,
            new_drives=new_drives,
            bytes_per_second=limit,
            progress=meter,
            notify=_emit,
            engine=workers,
        )
    lost = [damage for damage in report.damage if not damage.repaired_from]
    is_ok = not lost and not report.unread
    if as_json:
        silent = {name: {"kind": error.kind, "detail": error.what} for name, error in report.silent.items()}
        rows = [damage._asdict() for damage in report.damage]
        mirrors = {name: _rebuilt_json(rebuilt) for name, rebuilt in report.mirrors.items()}
        emit_json(
            {
                "ok": is_ok,
                "checkpoints": report.checkpoints,
                "bytes": report.bytes,
                "damage": rows,
                "unread": [unread._asdict() for unread in report.unread],
                "silent": silent,
                "mirrors": mirrors,
            }
        )
        return 0 if is_ok else 1
    for damage in report.damage:
        word = paint("REPAIRED", "yellow") if damage.repaired_from else paint("DAMAGED", "red")
        source = f"; from {damage.repaired_from}" if damage.repaired_from else ""
        click.echo(f"{word}  {damage.tier}: {escape(damage.file)}: {escape(damage.detail)}{source}")
    for unread in report.unread:
        click.echo(f"{paint('UNREAD', 'yellow')}  {unread.tier}: {escape(unread.file)}: {escape(unread.detail)}")
    for name, error in report.silent.items():
        click.echo(f"{paint('SILENT', 'yellow')}  {name}: {escape(error.what)}")
    for rebuilt in report.mirrors.values():
        for line in _mirror_lines(rebuilt):
            click.echo(line)
    scope = f"{count_text(report.checkpoints, 'checkpoint')} in all tiers, {size_text(report.bytes)}"
    repaired = len(report.damage) - len(lost)
    outcomes = [f"{count_text(repaired, 'file')} repaired, {len(lost)} damaged"] if report.damage else []
    outcomes += [f"{count_text(len(report.unread), 'file')} could not be read"] if report.unread else []
    click.echo(f"{scope}: {', '.join(outcomes) or 'as committed, to the byte'}")
    return 0 if is_ok else 1


def _rebuilt_json(rebuilt: RebuiltDrives) -> dict[str, Any]:
    return {**rebuilt._asdict(), "drives": [drive._asdict() for drive in rebuilt.drives]}


def _mirror_lines(rebuilt: RebuiltDrives) -> Iterator[str]:
    """Yield what was done to a mirrored store's drives, and which are not whole."""
    if rebuilt.files or rebuilt.deleted:
        deleted = f", {count_text(rebuilt.deleted, 'file')} deleted" if rebuilt.deleted else ""
        yield f"{count_text(rebuilt.files, 'file')} copied between drives, {size_text(rebuilt.bytes)}{deleted}"
    for path in rebuilt.rebuilt:
        yield f"{paint('REBUILT', 'green')}  {escape(path)}"
    for drive in rebuilt.drives:
        if drive.status != "good":
            yield f"{paint(drive.status.upper(), 'yellow')}  {escape(drive.path)}: {escape(drive.why)}"
        if drive.status == "away":
            yield f"  mount it; if it is a new drive, repeat with --new-drive {escape(shlex.quote(drive.path))}"


def _emit(name: str, message: str, fields: dict[str, Any]) -> None:
    """Emit the event, so that monitors of the run receive it."""
    emit(name, message, **fields)
