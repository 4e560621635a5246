"""``relight scrub``: read everything again, and mend what is damaged from another tier."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate
from relight.cli.common import json_option, keep_events
from relight.cli.output import emit_json, escape, paint, plural, progress, size
from relight.drain.outwards import residency
from relight.drain.scrub import scrub
from relight.errors import ConfigError
from relight.observe import emit
from relight.policy.units import bytes_of


@click.command("scrub")
@click.argument("path")
@click.option("--rate", metavar="SIZE", help="Read no more than this a second: 50MB.")
@click.option("--no-repair", is_flag=True, help="Only say what is damaged.")
@json_option
def command(path: str, rate: str | None, no_repair: bool, as_json: bool) -> int:
    """Read every byte of a run again, in all of its tiers, and write what is damaged in one anew from another.

    What is written is checked against the hashes that were committed; nothing else of the run changes. Exit code 1 if something is damaged
    in all of them, or was not to be repaired.

    \b
    Examples:
      relight scrub /nvme/ckpts/demo
      relight scrub /nvme/ckpts/demo --rate 50MB
    """
    place = locate(path)
    if place.run is None or place.which is not None:
        raise ConfigError("scrubbing is a run's: name one", where=path)
    _, merged, _ = residency(place.store, place.run)
    total = sum(copy.checkpoint.body.stored_bytes for copies in merged.copies.values() for copy in copies)
    limit = None if rate is None else float(bytes_of(rate, "--rate"))
    keep_events(place.store.url, place.run)
    with progress("reading", total) as meter:
        report = scrub(place.store, place.run, repair=not no_repair, bytes_per_second=limit, progress=meter, tell=_emit)
    lost = [one for one in report.damage if not one.repaired_from]
    if as_json:
        silent = {name: {"kind": error.kind, "detail": error.what} for name, error in report.silent.items()}
        rows = [one._asdict() for one in report.damage]
        emit_json({"ok": not lost, "checkpoints": report.checkpoints, "bytes": report.bytes, "damage": rows, "silent": silent})
        return 1 if lost else 0
    for one in report.damage:
        word = paint("REPAIRED", "yellow") if one.repaired_from else paint("DAMAGED", "red")
        source = f"; from {one.repaired_from}" if one.repaired_from else ""
        click.echo(f"{word}  {one.tier}: {escape(one.file)}: {escape(one.detail)}{source}")
    for name, error in report.silent.items():
        click.echo(f"{paint('SILENT', 'yellow')}  {name}: {escape(error.what)}")
    told = f"{plural(report.checkpoints, 'checkpoint')} in all tiers, {size(report.bytes)}"
    mended = len(report.damage) - len(lost)
    found = f"{plural(mended, 'file')} repaired, {len(lost)} damaged" if report.damage else "as committed, to the byte"
    click.echo(f"{told}: {found}")
    return 1 if lost else 0


def _emit(name: str, say: str, fields: dict[str, Any]) -> None:
    """Whoever watches the run hears of it."""
    emit(name, say, **fields)
