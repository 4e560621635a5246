"""``relight cp --tiers``: copy missing checkpoints to a run's further tiers."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate
from relight.catalog.tiers import open_tier, read_tier, tiers_of
from relight.cli.common import json_option
from relight.cli.output import emit_json, escape, paint
from relight.drain.outwards import drain, owed_to
from relight.errors import ConfigError
from relight.log import Log, fold
from relight.observe.progress_bar import progress_bar
from relight.store.wrapper import guard_of
from relight.units import count_text, size_text


@click.command("cp --tiers")
@click.argument("path")
@click.option("--dry-run", is_flag=True, help="Only list what each tier lacks.")
@json_option
def command(path: str, dry_run: bool, as_json: bool) -> int:
    """Copy the checkpoints that a run's further tiers must hold and lack, as its training does by itself.

    The run's log lists the tiers (relight.Tiers). Every byte is verified on the way. After an interruption, repeat the command to continue.
    Exit code 1 if a tier still lacks a checkpoint in the end.

    \b
    Examples:
      relight cp /nvme/ckpts/demo --tiers
      relight cp /nvme/ckpts/demo --tiers --dry-run --json
    """
    place = locate(path)
    if place.run is None or place.which is not None:
        raise ConfigError(
            "tiers belong to a run, not to a store or a checkpoint", where=path, hint="relight cp STORE/RUN --tiers"
        )
    history = fold(Log(place.store, place.run).read())
    tiers = tiers_of(history)
    if not tiers:
        hint = "a Checkpointer with relight.Tiers(…) records them in the run's log"
        raise ConfigError("this run has no further tiers", where=path, hint=hint)
    wanted: dict[str, list[str]] = {}
    for tier in tiers:
        reach = read_tier(tier.name, *open_tier(tier, guard_of(place.store)))
        wanted[tier.name] = owed_to(tier, history, reach.history, at_pace=False) if reach.error is None else []
        if reach.error is not None and dry_run:
            raise reach.error
    bytes_of = {checkpoint.id: checkpoint.body.alone_bytes for checkpoint in history.live}
    total = sum(bytes_of[checkpoint_id] for ids in wanted.values() for checkpoint_id in ids)
    if dry_run:
        _print_wanted(wanted, bytes_of, as_json)
        return 0
    with progress_bar("copying", total) as meter:
        report = drain(place.store, place.run, progress=meter, at_pace=False)
    copied = [
        {"tier": tier, "id": checkpoint_id, "bytes": count, "seconds": round(seconds, 3)}
        for tier, checkpoint_id, count, seconds in report.copied
    ]
    if as_json:
        errors = {name: {"kind": error.kind, "detail": error.what} for name, error in report.errors.items()}
        emit_json({"copied": copied, "owed": report.owed, "errors": errors})
    else:
        for name, error in report.errors.items():
            click.echo(f"{paint('FAILED', 'red')}  {name}: {escape(error.what)}")
        for tier in tiers:
            mine = [row for row in copied if row["tier"] == tier.name]
            count = sum(bytes_of.get(str(row["id"]), 0) for row in mine)
            summary = f"copied {count_text(len(mine), 'checkpoint')}, {size_text(count)}" if mine else "nothing to copy"
            if tier.name not in report.errors or mine:
                click.echo(f"{tier.name}: {summary}")
    return 1 if report.errors or any(report.owed.values()) else 0


def _print_wanted(wanted: dict[str, list[str]], bytes_of: dict[str, int], as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {"tier": tier, "id": checkpoint_id, "bytes": bytes_of[checkpoint_id]}
            for tier, ids in wanted.items()
            for checkpoint_id in ids
        ]
        emit_json({"dry_run": True, "copy": rows})
        return
    for tier, ids in wanted.items():
        click.echo(
            f"{tier}: lacks {count_text(len(ids), 'checkpoint')}, {size_text(sum(bytes_of[checkpoint_id] for checkpoint_id in ids))}"
        )
