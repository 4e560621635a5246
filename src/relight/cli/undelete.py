"""``relight undelete``: bring back retired checkpoints whose bytes still exist."""

from __future__ import annotations

import shlex

import click

from relight.catalog.locate import locate
from relight.cli.common import OpenedRun, json_option, open_run_at
from relight.cli.output import emit_json, escape, table, warn
from relight.errors import CheckpointNotFound, ConfigError
from relight.format.records import RetireBody
from relight.log import Checkpoint
from relight.reclaim import due_of, recall, sweep_recallable
from relight.units import count_text, duration_text

ALL = "all"


@click.command("undelete")
@click.argument("path")
@click.argument("which", nargs=-1)
@click.option("--why", default="", help="The reason; recorded in the log.")
@click.option("--give-up", is_flag=True, help="Instead of bringing them back, delete their bytes now.")
@json_option
def command(path: str, which: tuple[str, ...], why: str, give_up: bool, as_json: bool) -> None:
    """Bring back retired checkpoints; without WHICH, list those that can be brought back.

    Their bytes exist for the time that the rules gave
    (keep(undo_window="12h"), prune --undo-window 12h). WHICH is an id, a step, or "all".
    Tags do not come back. The retention rules apply again to these checkpoints: tag
    or hold them to keep them.

    \b
    Examples:
      relight undelete runs/demo
      relight undelete runs/demo 1999 --why "retired by mistake"
      relight undelete runs/demo all --give-up
    """
    opened = open_run_at(path)
    store, run = opened.run.store, opened.run.name
    if not which:
        if give_up or why:
            raise ConfigError("which checkpoint?", where=path, hint="an id, a step, or all")
        _list(opened, as_json)
        return
    chosen = _chosen(opened, which)
    ids = [checkpoint.id for checkpoint in chosen]
    if give_up:
        deleted, left = sweep_recallable(store, run, ids)
        gone = {*deleted, *left}
        needed = [checkpoint.id for checkpoint in chosen if checkpoint.body.dir not in gone]
        ids = [checkpoint_id for checkpoint_id in ids if checkpoint_id not in needed]
        for kept in needed:
            warn(f"{kept} stays: others need its bytes, or have claimed it meanwhile")
        if as_json:
            emit_json({"given_up": ids, "deleted": deleted, "left": left})
        else:
            click.echo(f"{count_text(len(ids), 'checkpoint')} given up, {len(deleted)} deleted")
            for name in left:
                click.echo(f"{escape(name)} could not be deleted yet: the next prune --sweep tries again")
        return
    recall(store, run, ids, why)
    if as_json:
        emit_json({"recalled": ids, "why": why})
    place = path.rstrip("/") if locate(path).run is not None else f"{path.rstrip('/')}/{run}"
    for checkpoint in chosen if not as_json else ():
        click.echo(
            f"{checkpoint.id} (step {checkpoint.step}) is back, until the rules of the run's next save remove it"
        )
        click.echo(f"to keep it: relight tag {escape(shlex.quote(f'{place}@{checkpoint.id}'))} --hold --why REASON")


def _chosen(opened: OpenedRun, which: tuple[str, ...]) -> list[Checkpoint]:
    recallable = [opened.history.retired[checkpoint_id] for checkpoint_id in opened.history.recallable]
    if which == (ALL,):
        if not recallable:
            raise CheckpointNotFound("nothing can be recalled", where=opened.run.name)
        return recallable
    chosen = []
    for text in which:
        fit = [checkpoint for checkpoint in recallable if checkpoint.id == text] or [
            checkpoint for checkpoint in recallable if str(checkpoint.step) == text
        ]
        if not fit:
            raise CheckpointNotFound(
                f"{text[:40]!r} is nothing that can be recalled", hint="relight undelete RUN lists what can be"
            )
        chosen.append(fit[-1])
    return chosen


def _list(opened: OpenedRun, as_json: bool) -> None:
    due = due_of(opened.view, opened.history)
    rows = []
    for checkpoint_id, retired in opened.history.recallable.items():
        checkpoint = opened.history.retired[checkpoint_id]
        assert isinstance(retired.body, RetireBody)
        rows.append(
            {
                "id": checkpoint.id,
                "step": checkpoint.step,
                "retired": retired.time,
                "reason": retired.body.reason,
                "undo_s": retired.body.undo_s,
                "due": checkpoint.id in due,
                "stored_bytes": checkpoint.body.stored_bytes,
            }
        )
    if as_json:
        emit_json(rows)
    elif not rows:
        click.echo("nothing can be recalled")
    else:
        cells = [[row["id"], row["step"], row["retired"], _until(row["undo_s"], bool(row["due"]))] for row in rows]
        table(["id", "step", "retired", "stays"], cells, right=("step",))


def _until(undo_s: object, due: bool) -> str:
    return "until the next save" if due else f"for {duration_text(float(str(undo_s)))} of the run"
