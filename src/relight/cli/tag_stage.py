"""``relight tag --stage``: move a stage (candidate, staging, production) to a checkpoint."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, since, table
from relight.errors import ConfigError
from relight.versions.stages import STAGES, clear, promote, promotions, take_back


@click.command("tag --stage")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("stage", required=False, type=click.Choice(STAGES))
@click.option("--why", default="", help="The reason; recorded in the log, with author and time.")
@click.option("--back", is_flag=True, help="Move STAGE back to its previous checkpoint.")
@click.option("--clear", "emptied", is_flag=True, help="Clear STAGE; the checkpoint stays.")
@click.option("--list", "listed", is_flag=True, help="List every move of the stages.")
@json_option
def command(path: str, stage: str | None, why: str, back: bool, emptied: bool, listed: bool, as_json: bool) -> None:
    """Move a stage (candidate, staging, production) to this checkpoint; by default the stage after its present one.

    A stage is a tag: the checkpoint is kept, and RUN@production means it everywhere.

    \b
    Examples:
      relight tag runs/demo@2000 --stage --why "passed the evaluation"
      relight tag runs/demo@staging --stage production
      relight tag runs/demo --stage production --back
      relight tag runs/demo --stage staging --clear
      relight tag runs/demo --stage --list
    """
    opened = open_run_at(path)
    if listed:
        moves = promotions(opened.view.records, stage)
        if as_json:
            emit_json(
                [
                    {**move._asdict(), "now": opened.history.tags.get(move.stage) == move.id is not None}
                    for move in moves
                ]
            )
        elif moves:
            now = {name: opened.history.tags.get(name) for name in STAGES}
            last = {move.stage: number for number, move in enumerate(moves)}
            here = [
                "now" if last[move.stage] == number and now[move.stage] == move.id else ""
                for number, move in enumerate(moves)
            ]
            rows = [
                [move.stage, move.id or "(nothing)", is_now, since(move.time), move.by, move.why]
                for move, is_now in zip(moves, here)
            ]
            table(["stage", "id", "", "when", "by", "why"], rows, wrap=("why",))
        else:
            click.echo("nothing was promoted yet")
        return
    if emptied:
        if stage is None or back:
            raise ConfigError("--clear needs the stage, and not --back")
        clear(opened.run, stage, why=why)
        if as_json:
            emit_json({"stage": stage, "id": None, "step": None})
        else:
            click.echo(f"{stage} is empty now")
        return
    if back:
        if stage is None:
            raise ConfigError("--back needs the stage")
        result, checkpoint_id = stage, take_back(opened.run, stage, why=why)
    else:
        checkpoint = opened.choose(None)
        result, checkpoint_id = promote(opened.run, checkpoint, stage, why=why), checkpoint.id
    step = next(live.step for live in opened.history.live if live.id == checkpoint_id)
    if as_json:
        emit_json({"stage": result, "id": checkpoint_id, "step": step})
    else:
        click.echo(f"{result} → {checkpoint_id} (step {step}) of {escape(opened.run.name)}")
