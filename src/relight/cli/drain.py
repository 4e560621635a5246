"""``relight drain``: copy to a run's further tiers what they lack."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate
from relight.catalog.tiers import open_tier, read_tier, tiers_of
from relight.cli.common import json_option
from relight.cli.output import emit_json, escape, paint, plural, progress, size
from relight.drain.outwards import drain, owed_to
from relight.errors import ConfigError
from relight.log import Log, fold
from relight.store.wrapper import guard_of


@click.command("drain")
@click.argument("path")
@click.option("--dry-run", is_flag=True, help="Only say what each tier lacks.")
@json_option
def command(path: str, dry_run: bool, as_json: bool) -> int:
    """Copy to a run's further tiers what they are to hold and lack, as its training does by itself.

    The run's log says which tiers there are (relight.Tiers). Every byte is verified on the way; said again after an interruption, it goes
    on where it was. Exit code 1 if a tier does not have all of it in the end.

    \b
    Examples:
      relight drain /nvme/ckpts/demo
      relight drain /nvme/ckpts/demo --dry-run --json
    """
    place = locate(path)
    if place.run is None or place.which is not None:
        raise ConfigError("draining is a run's: name one", where=path)
    history = fold(Log(place.store, place.run).read())
    tiers = tiers_of(history)
    if not tiers:
        hint = "a Checkpointer with relight.Tiers(…) tells its log which there are"
        raise ConfigError("this run has no further tiers", where=path, hint=hint)
    wanted: dict[str, list[str]] = {}
    for tier in tiers:
        reach = read_tier(tier.name, *open_tier(tier, guard_of(place.store)))
        wanted[tier.name] = owed_to(tier, history, reach.history, at_pace=False) if reach.error is None else []
        if reach.error is not None and dry_run:
            raise reach.error
    bytes_of = {one.id: one.body.alone_bytes for one in history.live}
    total = sum(bytes_of[one] for ids in wanted.values() for one in ids)
    if dry_run:
        _print_wanted(wanted, bytes_of, as_json)
        return 0
    with progress("copying", total) as meter:
        report = drain(place.store, place.run, progress=meter, at_pace=False)
    copied = [{"tier": tier, "id": one, "bytes": count, "seconds": round(seconds, 3)} for tier, one, count, seconds in report.copied]
    if as_json:
        errors = {name: {"kind": error.kind, "detail": error.what} for name, error in report.errors.items()}
        emit_json({"copied": copied, "owed": report.owed, "errors": errors})
    else:
        for name, error in report.errors.items():
            click.echo(f"{paint('FAILED', 'red')}  {name}: {escape(error.what)}")
        for tier in tiers:
            mine = [row for row in copied if row["tier"] == tier.name]
            count = sum(bytes_of.get(str(row["id"]), 0) for row in mine)
            told = f"copied {plural(len(mine), 'checkpoint')}, {size(count)}" if mine else "nothing to copy"
            if tier.name not in report.errors or mine:
                click.echo(f"{tier.name}: {told}")
    return 1 if report.errors or any(report.owed.values()) else 0


def _print_wanted(wanted: dict[str, list[str]], bytes_of: dict[str, int], as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [{"tier": tier, "id": one, "bytes": bytes_of[one]} for tier, ids in wanted.items() for one in ids]
        emit_json({"dry_run": True, "copy": rows})
        return
    for tier, ids in wanted.items():
        click.echo(f"{tier}: lacks {plural(len(ids), 'checkpoint')}, {size(sum(bytes_of[one] for one in ids))}")
