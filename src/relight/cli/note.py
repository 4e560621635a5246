"""``relight note``: write something about a checkpoint."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import age, emit_json, table
from relight.versions.stages import notes_of, write_note


@click.command("note")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("text", required=False)
@json_option
def command(path: str, text: str | None, as_json: bool) -> None:
    """Write something about a checkpoint, by default the newest; without TEXT, read what was written.

    \b
    Examples:
      relight note runs/demo@2000 "before the spike; day 3 begins here"
      relight note runs/demo
    """
    found = open_run_at(path)
    if text is not None:
        one = found.choose(None)
        write_note(found.run, one, text)
        if as_json:
            emit_json({"id": one.id, "step": one.step, "text": text})
        else:
            click.echo(f"{one.id} (step {one.step}): noted")
        return
    notes = notes_of(found.history, found.choose(None).id if found.which else None)
    steps = {one.id: one.step for one in [*found.history.live, *found.history.retired.values()]}
    if as_json:
        emit_json([{**note._asdict(), "step": steps.get(note.id)} for note in notes])
    elif notes:
        rows = [[note.id, steps.get(note.id, ""), age(note.time), note.by, note.text] for note in notes]
        table(["id", "step", "when", "by", "note"], rows, right=("step",), wrap=("note",))
    else:
        click.echo("no note yet")
