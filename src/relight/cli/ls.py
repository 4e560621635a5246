"""``relight ls``: list the checkpoints of a run, or the runs of a store."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import Location, locate
from relight.catalog.run import list_runs
from relight.cli.common import json_option, open_run_at, read_run
from relight.cli.ls_table import print_table, sorted_rows
from relight.cli.output import emit_json, escape, since, table, warn
from relight.errors import ConfigError, RelightError, WrongKey
from relight.log import Checkpoint, History
from relight.run_records.verification import VerificationResult, checked
from relight.store.anchored import anchor_of
from relight.units import count_text, size_text


@click.command("ls")
@click.argument("path")
@click.option("-n", "newest", type=click.IntRange(min=1), metavar="N", help="Only the newest N.")
@click.option("--tiers", is_flag=True, help="Show which tiers have each checkpoint: reads the further tiers' logs.")
@click.option("--sort", "by", metavar="COLUMN", help="By step, saved, size or a metric; -COLUMN: the largest first.")
@click.option(
    "--columns",
    metavar="A,B,C",
    help="Only these: id, step, saved, size, new, reason, tags, flags, metrics, or one metric.",
)
@json_option
def command(path: str, newest: int | None, tiers: bool, by: str | None, columns: str | None, as_json: bool) -> None:
    """List the checkpoints of a run, newest last; or the runs of a store.

    A terminal shows a line for each checkpoint. What does not fit is shortened with …, metrics that do not fit are counted (+2), and a
    narrow terminal loses columns in this order: new, reason, size, tags, saved.

    \b
    Examples:
      relight ls runs/demo
      relight ls runs/demo --sort -val_acc -n 100
      relight ls runs/demo --columns id,step,loss,tags
      relight ls runs --json
    """
    place = locate(path)
    chosen = [name.strip() for name in (columns or "").split(",") if name.strip()]
    if chosen and (as_json or tiers):
        raise ConfigError(
            f"--columns does not go with {'--json' if as_json else '--tiers'}", hint="leave one of them out"
        )
    if tiers:
        if place.run is None:
            raise ConfigError("--tiers needs a run, not a store", where=path)
        _tiers(place, newest, by, as_json)
        return
    if place.run is None and place.which is None and not (by or chosen):
        _runs(place, as_json)
        return
    opened = open_run_at(path)
    shown = [opened.choose(None)] if opened.which else opened.history.live[-newest:] if newest else opened.history.live
    known = checked(opened.history)
    rows = [entry(opened.history, checkpoint, known.get(checkpoint.id)) for checkpoint in shown]
    if by:
        rows = sorted_rows(rows, by)
    if as_json:
        emit_json(rows)
    elif rows:
        print_table(rows, chosen, first=opened.history.best_by[0] if opened.history.best_by else None)
        new_bytes = sum(checkpoint.new_bytes for checkpoint in opened.history.live)
        total = f"{count_text(len(opened.history.live), 'checkpoint')}, {size_text(new_bytes)}"
        _damage(rows)
        click.echo(total if len(rows) == len(opened.history.live) else f"{len(rows)} of {total}")
    else:
        click.echo("no checkpoint yet")


def entry(history: History, checkpoint: Checkpoint, known: VerificationResult | None = None) -> dict[str, Any]:
    """Return a checkpoint's fields for ``--json``. ``known``: its last verification result."""
    body = checkpoint.body
    return {
        "id": body.id,
        "step": body.step,
        "steps_done": body.steps_done,
        "created": checkpoint.time,
        "reason": body.reason,
        "logical_bytes": body.logical_bytes,
        "stored_bytes": body.stored_bytes,
        "new_bytes": checkpoint.new_bytes,
        "metrics": checkpoint.metrics,
        "tags": history.tags_of(body.id),
        "requires": checkpoint.requires,
        "lossy": body.lossy,
        "parents": body.parents,
        "suspect": body.suspect,
        "set_aside": body.id in history.rolled_back_ids,
        "attempt": checkpoint.epoch,
        "dir": body.dir,
        "home": body.home,
        "damaged": known.to_dict() if known is not None and known.damage else None,
        "verified": known.to_dict() if known is not None and not known.damage else None,
    }


def _damage(rows: list[dict[str, Any]]) -> None:
    """Print a warning for each damaged checkpoint: the damage, and which tool found it when."""
    for row in rows:
        if damage := row["damaged"]:
            warn(
                f"checkpoint {row['id']} is damaged: {escape(damage['what'])} (found by {escape(damage['by'])}, {since(damage['at'])})"
            )


def _tiers(place: Location, newest: int | None, by: str | None, as_json: bool) -> None:
    """List the merged history of all tiers, with a column for each tier."""
    from relight.drain.outwards import residency

    assert place.run is not None
    names, merged, errors = residency(place.store, place.run)
    for name, error in zip(names, errors, strict=True):
        if error is not None:
            warn(f"tier {escape(name)} does not answer: {escape(error.what)}")
    shown = merged.history.live[-newest:] if newest else merged.history.live
    rows = [
        {
            **entry(merged.history, checkpoint, merged.damaged.get((0, checkpoint.id))),
            "tiers": [names[copy.place] for copy in merged.copies[checkpoint.id]],
            "damaged_in": [names[place] for place, id_ in merged.damaged if id_ == checkpoint.id],
        }
        for checkpoint in shown
    ]
    if by:
        rows = sorted_rows(rows, by)
    if as_json:
        emit_json(rows)
        return
    if not rows:
        click.echo("no checkpoint yet")
        return
    silent = {name for name, error in zip(names, errors, strict=True) if error is not None}
    cells: list[list[object]] = []
    for row in rows:
        places = [_there(name, row, silent) for name in names]
        cells.append([row["id"], row["step"], since(row["created"]), size_text(row["stored_bytes"]), *places])
    table(["id", "step", "saved", "size", *names], cells, right=("step", "size"))
    click.echo(
        ", ".join(f"{name}: {sum(name in row['tiers'] for row in rows)}" for name in names if name not in silent)
    )


def _there(name: str, row: dict[str, Any], silent: set[str]) -> str:
    return "?" if name in silent else "DAMAGED" if name in row["damaged_in"] else "yes" if name in row["tiers"] else "–"


_FIELDS = ("checkpoints", "latest_step", "latest_created", "stored_bytes", "attempts")


def _runs(place: Location, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    unread: list[dict[str, Any]] = []
    names = list_runs(place.store)
    for name in names:
        try:
            history = read_run(place, name).history
        except WrongKey:  # the key is the store's, so no run can be read
            raise
        except RelightError as error:  # an unreadable run must not hide the others
            warn(f"{escape(name)}: {escape(error.what)}")
            if anchor_of(place.store) is not None:  # a program must not take a refused run for an absent one
                unread.append({"run": name, **dict.fromkeys(_FIELDS), "error": error.kind})
            continue
        newest = history.live[-1] if history.live else None
        rows.append(
            {
                "run": name,
                "checkpoints": len(history.live),
                "latest_step": newest.step if newest else None,
                "latest_created": newest.time if newest else None,
                "stored_bytes": sum(checkpoint.new_bytes for checkpoint in history.live),
                "attempts": history.epoch,
            }
        )
    if as_json:
        emit_json(sorted([*rows, *unread], key=lambda row: str(row["run"])))
        return
    if not rows:
        click.echo("no run can be read" if names else "no run yet")
        return
    table(
        ["run", "checkpoints", "newest step", "saved", "size", "attempts"],
        [
            [
                row["run"],
                row["checkpoints"],
                "–" if row["latest_step"] is None else row["latest_step"],
                since(row["latest_created"]) if row["latest_created"] else "–",
                size_text(row["stored_bytes"]),
                row["attempts"],
            ]
            for row in rows
        ],
        right=("checkpoints", "newest step", "size", "attempts"),
        wrap=("run",),
    )
