"""``relight ls``."""

from __future__ import annotations

from typing import Any

import click

from relight.catalog.locate import locate
from relight.catalog.run import Run, list_runs
from relight.cli.common import json_option, open_run_at
from relight.cli.output import age, emit_json, metrics_text, size, table
from relight.log import Checkpoint, History, fold


@click.command("ls")
@click.argument("path")
@json_option
def command(path: str, as_json: bool) -> None:
    """List the checkpoints of a run, newest last; or the runs of a store.

    \b
    relight ls runs/demo
    relight ls runs --json
    """
    place = locate(path)
    if place.run is None:
        _runs(place.store, as_json)
        return
    _, _, history, _ = open_run_at(path)
    rows = [entry(history, one) for one in history.live]
    if as_json:
        emit_json(rows)
        return
    if not rows:
        click.echo("no checkpoint yet")
        return
    table(
        ["id", "step", "saved", "size", "new", "reason", "metrics", "tags"],
        [
            [
                row["id"],
                row["step"],
                age(row["created"]),
                size(row["stored_bytes"]),
                size(row["new_bytes"]),
                row["reason"],
                metrics_text(row["metrics"]),
                " ".join(row["tags"]) + (" SUSPECT" if row["suspect"] else ""),
            ]
            for row in rows
        ],
        right=("step", "size", "new"),
    )


def entry(history: History, one: Checkpoint) -> dict[str, Any]:
    """One checkpoint as ``--json`` shows it."""
    body = one.body
    return {
        "id": body.id,
        "step": body.step,
        "created": one.time,
        "reason": body.reason,
        "logical_bytes": body.logical_bytes,
        "stored_bytes": body.stored_bytes,
        "new_bytes": body.new_bytes,
        "metrics": body.metrics,
        "tags": history.tags_of(body.id),
        "requires": body.requires,
        "parents": body.parents,
        "suspect": body.suspect,
        "attempt": one.epoch,
        "dir": body.dir,
    }


def _runs(store: Any, as_json: bool) -> None:
    rows: list[dict[str, Any]] = []
    for name in list_runs(store):
        history = fold(Run(store, name).view())
        newest = history.live[-1] if history.live else None
        rows.append(
            {
                "run": name,
                "checkpoints": len(history.live),
                "latest_step": newest.step if newest else None,
                "latest_created": newest.time if newest else None,
                "stored_bytes": sum(one.body.stored_bytes for one in history.live),
                "attempts": history.epoch,
            }
        )
    if as_json:
        emit_json(rows)
        return
    if not rows:
        click.echo("no run yet")
        return
    table(
        ["run", "checkpoints", "latest step", "saved", "size", "attempts"],
        [
            [
                row["run"],
                row["checkpoints"],
                "–" if row["latest_step"] is None else row["latest_step"],
                age(row["latest_created"]) if row["latest_created"] else "–",
                size(row["stored_bytes"]),
                row["attempts"],
            ]
            for row in rows
        ],
        right=("checkpoints", "latest step", "size", "attempts"),
    )
