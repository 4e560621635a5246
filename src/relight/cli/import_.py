"""``relight import``: import a checkpoint of another framework."""

from __future__ import annotations

import os
from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import json_option
from relight.cli.output import emit_json, escape, facts_list
from relight.observe.progress_bar import progress_bar
from relight.units import count_text, duration_text, size_text


@click.command("import")
@click.argument("source")
@click.argument("run", metavar="RUN")
@click.option("--dry-run", is_flag=True, help="Only list what would be imported.")
@click.option("--step", type=click.IntRange(min=0), help="The step, if the source lacks it or has another.")
@click.option("--force", is_flag=True, help="Also if the run has another history: it will resume from the import.")
@click.option("--only", multiple=True, metavar="GLOB", help="Only what matches, such as 'model/*'. Repeatable.")
@json_option
def command(
    source: str, run: str, dry_run: bool, step: int | None, force: bool, only: tuple[str, ...], as_json: bool
) -> None:
    """Import a checkpoint of another framework as a checkpoint of RUN; with --all, every checkpoint below a directory.

    SOURCE is a local file or folder, or one in a bucket: torch.save, safetensors, Hugging Face, Lightning, DCP, Accelerate,
    DeepSpeed, Megatron, torchsnapshot, Orbax. It is recognised by its content, and nothing in it is executed. State that
    belongs to none of a script's components is kept below 'imported'. Importing the same checkpoint again changes nothing.

    \b
    Examples:
      relight import out/checkpoint-500 runs/tuned --dry-run
      relight import model.safetensors runs/base --only 'model/*'
      relight import --all /old/checkpoints runs
    """
    from relight.importers import detect, import_checkpoint
    from relight.importers.found import plant

    detected = detect(source)
    planted = plant(detected.content, detected.files, only)
    total = sum(item.source.length for item in planted.items)
    facts: dict[str, Any] = {
        "format": detected.format,
        "kind": detected.kind,
        "path": detected.path,
        "step": detected.step if step is None else step,
        "tensors": len(planted.items),
        "bytes": total,
        "metrics": detected.metrics,
        "parts": planted.parts,
        "left_out": [{"what": what, "why": why} for what, why in planted.left_out],
        "notes": detected.notes,
    }
    if not as_json:
        _print_found(facts)
    if dry_run:
        if as_json:
            emit_json({"dry_run": True, **facts})
        return
    place = locate_destination(run, os.path.splitext(detected.files.name)[0] or "imported")
    assert place.run is not None
    with progress_bar("importing", total) as meter:
        report = import_checkpoint(detected, place.store, place.run, step=step, which=only, progress=meter, force=force)
    to = f"{place.store.url.rstrip('/')}/{place.run}"
    if as_json:
        emit_json(
            {
                **facts,
                "to": to,
                "id": report.id,
                "step": report.step,
                "there": report.there,
                "seconds": round(report.seconds, 3),
            }
        )
        return
    shown = escape(to.removeprefix(f"{os.getcwd()}/"))
    done = (
        "is there already" if report.there else f"imported {size_text(report.bytes)} in {duration_text(report.seconds)}"
    )
    click.echo(f"{report.id}  step {report.step} of {shown}: {done}")


def _print_found(facts: dict[str, Any]) -> None:
    """Print what the source contains, before anything is imported."""
    click.echo(f"{escape(facts['format'])}: {count_text(facts['tensors'], 'tensor')}, {size_text(facts['bytes'])}")
    rows: list[tuple[str, object]] = [("step", _unknown(facts["path"]) if facts["step"] is None else facts["step"])]
    rows += [(name, _part(text)) for name, text in facts["parts"].items()]
    click.echo()
    facts_list(rows)
    for item in facts["left_out"][:20]:
        _line(f"left out: {escape(item['what'])[:60]}: {escape(item['why'])}")
    if len(facts["left_out"]) > 20:
        click.echo(f"  … and {len(facts['left_out']) - 20} more: --json lists them")
    for note in facts["notes"]:
        _line(f"note: {escape(note)}")


def _unknown(path: str) -> str:
    """Return the text for a step that the source does not record. Its name may have a number, which need not be a step."""
    from relight.migrate.finding import number_in

    number = number_in(path)
    return f"not recorded: 0{'' if number is None else f' (if it is {number}: --step {number})'}"


def _line(text: str) -> None:
    from textwrap import fill

    click.echo(fill(text, 84, initial_indent="  ", subsequent_indent="    "))


def _part(description: str) -> str:
    """Return a part's description with its bytes for people."""
    words = description.split(", ")
    shown = [
        size_text(int(word.removesuffix(" bytes"))) if word.endswith(" bytes") and word[:-6].isdecimal() else word
        for word in words
    ]
    return ", ".join(shown)
