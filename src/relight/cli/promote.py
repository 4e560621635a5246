"""``relight promote``: candidate, staging, production: with who and why."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import age, emit_json, escape, table
from relight.errors import ConfigError
from relight.versions.stages import STAGES, clear, promote, promotions, take_back


@click.command("promote")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("stage", required=False, type=click.Choice(STAGES))
@click.option("--why", default="", help="The reason; the log keeps it, with who and when.")
@click.option("--back", is_flag=True, help="Have STAGE be what it was before.")
@click.option("--clear", "emptied", is_flag=True, help="Empty STAGE; the checkpoint stays.")
@click.option("--list", "listed", is_flag=True, help="What is in which stage, and what was.")
@json_option
def command(path: str, stage: str | None, why: str, back: bool, emptied: bool, listed: bool, as_json: bool) -> None:
    """Have a stage (candidate, staging, production) be this checkpoint; by default the next one behind where it is.

    A stage is a tag: the checkpoint is kept, and RUN@production means it everywhere.

    \b
    Examples:
      relight promote runs/demo@2000 --why "passed the evaluation"
      relight promote runs/demo@staging production
      relight promote runs/demo production --back
      relight promote runs/demo staging --clear
      relight promote runs/demo --list
    """
    found = open_run_at(path)
    if listed:
        moves = promotions(found.view.records, stage)
        if as_json:
            emit_json([{**move._asdict(), "now": found.history.tags.get(move.stage) == move.id is not None} for move in moves])
        elif moves:
            now = {name: found.history.tags.get(name) for name in STAGES}
            last = {move.stage: number for number, move in enumerate(moves)}
            here = ["now" if last[move.stage] == number and now[move.stage] == move.id else "" for number, move in enumerate(moves)]
            rows = [[move.stage, move.id or "(nothing)", is_now, age(move.time), move.by, move.why] for move, is_now in zip(moves, here)]
            table(["stage", "id", "", "when", "by", "why"], rows, wrap=("why",))
        else:
            click.echo("nothing was promoted yet")
        return
    if emptied:
        if stage is None or back:
            raise ConfigError("--clear needs the stage, and not --back")
        clear(found.run, stage, why=why)
        if as_json:
            emit_json({"stage": stage, "id": None, "step": None})
        else:
            click.echo(f"{stage} is empty now")
        return
    if back:
        if stage is None:
            raise ConfigError("--back needs the stage")
        result, checkpoint_id = stage, take_back(found.run, stage, why=why)
    else:
        one = found.choose(None)
        result, checkpoint_id = promote(found.run, one, stage, why=why), one.id
    step = next(one.step for one in found.history.live if one.id == checkpoint_id)
    if as_json:
        emit_json({"stage": result, "id": checkpoint_id, "step": step})
    else:
        click.echo(f"{result} → {checkpoint_id} (step {step}) of {escape(found.run.name)}")
