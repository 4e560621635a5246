"""``relight note``: write a note about a checkpoint."""

from __future__ import annotations

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, since, table
from relight.versions.stages import notes_of, write_note


@click.command("note")
@click.argument("path", metavar="RUN[@WHICH]")
@click.argument("text", required=False)
@json_option
def command(path: str, text: str | None, as_json: bool) -> None:
    """Write a note about a checkpoint, by default the newest; without TEXT, list the notes.

    \b
    Examples:
      relight note runs/demo@2000 "before the spike; day 3 begins here"
      relight note runs/demo
    """
    opened = open_run_at(path)
    if text is not None:
        checkpoint = opened.choose(None)
        write_note(opened.run, checkpoint, text)
        if as_json:
            emit_json({"id": checkpoint.id, "step": checkpoint.step, "text": text})
        else:
            click.echo(f"{checkpoint.id} (step {checkpoint.step}): noted")
        return
    notes = notes_of(opened.history, opened.choose(None).id if opened.which else None)
    steps = {checkpoint.id: checkpoint.step for checkpoint in [*opened.history.live, *opened.history.retired.values()]}
    if as_json:
        emit_json([{**note._asdict(), "step": steps.get(note.id)} for note in notes])
    elif notes:
        rows = [[note.id, steps.get(note.id, ""), since(note.time), note.by, note.text] for note in notes]
        table(["id", "step", "when", "by", "note"], rows, right=("step",), wrap=("note",))
    else:
        click.echo("no note yet")
