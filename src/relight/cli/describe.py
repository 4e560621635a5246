"""``relight describe``: describe a checkpoint and its origin."""

from __future__ import annotations

from typing import Any

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import code_text, emit_json, escape, facts_list, metrics_text, number, paint, since
from relight.units import size_text
from relight.versions.describing import describe


@click.command("describe")
@click.argument("path", metavar="RUN[@WHICH]")
@json_option
def command(path: str, as_json: bool) -> None:
    """Describe a checkpoint: its name, origin, code, position in the data, branches, stages and notes.

    The name is RUN@TAG, or RUN@TAG+N for N checkpoints after the nearest tag. relight show lists its tensors.

    \b
    Examples:
      relight describe runs/demo
      relight describe runs/demo@best --json
    """
    opened = open_run_at(path)
    facts = describe(opened.run, opened.choose(None))
    if as_json:
        emit_json(facts)
        return
    click.echo(paint(escape(facts["name"]), "bold"))
    facts_list([(name, value) for name, value in _shown(facts) if value])


def _shown(facts: dict[str, Any]) -> list[tuple[str, str]]:
    parents = [
        f"{parent['id']} (step {parent['step']})" if parent["step"] is not None else parent["id"]
        for parent in facts["parents"]
    ]
    code = facts["code"] or {}
    moves = [f"{move['stage']} {since(move['time'])}" + _by(move["by"], move["why"]) for move in facts["promotions"]]
    return [
        ("checkpoint", f"{facts['id']}, step {facts['step']}, {size_text(facts['bytes'])}"),
        ("saved", f"{since(facts['created'])}, {facts['created']}, {facts['reason']}"),
        ("from", " ".join(parents) or "nothing: a fresh run"),
        ("stored in", facts["lies_in"] if facts["lies_in"] != facts["run"] else ""),
        ("branches", ", ".join(facts["branches"])),
        ("tags", " ".join(facts["tags"])),
        ("promoted", "; ".join(moves)),
        *(("note", f"{note['text']}{_by(note['by'], '')}, {since(note['time'])}") for note in facts["notes"]),
        ("metrics", metrics_text(facts["metrics"])),
        ("metadata", ", ".join(f"{name}={_value(value)}" for name, value in facts["metadata"].items())),
        ("code", code_text(code)),
        ("started as", " ".join(facts["arguments"] or [])),
        ("data at", ", ".join(f"{name}={_value(value)}" for name, value in list(facts["data"].items())[:8])),
        ("exact", "no: " + "; ".join(facts["exact"]) if facts["exact"] else ""),
    ]


def _by(who: str, why: str) -> str:
    return (f" by {who}" if who else "") + (f": {why}" if why else "")


def _value(value: Any) -> str:
    text = number(value)
    return text if len(text) <= 60 else f"{text[:57]}…"
