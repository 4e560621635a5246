"""``relight scrub``: read every byte again, and repair damage from another tier."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate
from relight.cli.common import engine_of, engine_options, json_option, keep_events
from relight.cli.output import emit_json, escape, paint, progress
from relight.drain.outwards import residency
from relight.drain.scrub import scrub
from relight.errors import ConfigError
from relight.observe import emit
from relight.policy.argument_checks import bytes_of
from relight.units import count_text, size_text


@click.command("scrub")
@click.argument("path")
@click.option("--rate", metavar="SIZE", help="Largest rate of reading, in bytes a second: 50MB.")
@click.option("--no-repair", is_flag=True, help="Only list what is damaged.")
@engine_options()
@json_option
def command(path: str, rate: str | None, no_repair: bool, engine: str | None, jobs: int | None, as_json: bool) -> int:
    """Read every byte of a run again, in all of its tiers, and repair damage in one tier from another.

    Repaired bytes are checked against the committed hashes; nothing else of the run changes. Exit code 1 if bytes are damaged in all tiers,
    or were not repaired because of --no-repair.

    \b
    Examples:
      relight scrub /nvme/ckpts/demo
      relight scrub /nvme/ckpts/demo --rate 50MB
    """
    place = locate(path)
    if place.run is None or place.which is not None:
        raise ConfigError("scrub needs a run, not a store or a checkpoint", where=path, hint="relight scrub STORE/RUN")
    _, merged, _ = residency(place.store, place.run)
    total = sum(copy.checkpoint.body.stored_bytes for copies in merged.copies.values() for copy in copies)
    limit = None if rate is None else float(bytes_of(rate, "--rate"))
    keep_events(place.store.url, place.run)
    with engine_of(engine, jobs) as workers, progress("reading", total) as meter:
        report = scrub(
            place.store,
            place.run,
            repair=not no_repair,
            bytes_per_second=limit,
            progress=meter,
            notify=_emit,
            engine=workers,
        )
    lost = [damage for damage in report.damage if not damage.repaired_from]
    if as_json:
        silent = {name: {"kind": error.kind, "detail": error.what} for name, error in report.silent.items()}
        rows = [damage._asdict() for damage in report.damage]
        emit_json(
            {"ok": not lost, "checkpoints": report.checkpoints, "bytes": report.bytes, "damage": rows, "silent": silent}
        )
        return 1 if lost else 0
    for damage in report.damage:
        word = paint("REPAIRED", "yellow") if damage.repaired_from else paint("DAMAGED", "red")
        source = f"; from {damage.repaired_from}" if damage.repaired_from else ""
        click.echo(f"{word}  {damage.tier}: {escape(damage.file)}: {escape(damage.detail)}{source}")
    for name, error in report.silent.items():
        click.echo(f"{paint('SILENT', 'yellow')}  {name}: {escape(error.what)}")
    scope = f"{count_text(report.checkpoints, 'checkpoint')} in all tiers, {size_text(report.bytes)}"
    repaired = len(report.damage) - len(lost)
    outcome = (
        f"{count_text(repaired, 'file')} repaired, {len(lost)} damaged"
        if report.damage
        else "as committed, to the byte"
    )
    click.echo(f"{scope}: {outcome}")
    return 1 if lost else 0


def _emit(name: str, message: str, fields: dict[str, Any]) -> None:
    """Emit the event, so that monitors of the run receive it."""
    emit(name, message, **fields)
