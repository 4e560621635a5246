"""``relight log --why``: explain why a run saved when it did."""

from __future__ import annotations

from typing import Any

import click

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, facts_list, since, table
from relight.cost_model.schedule_note import ScheduleNote, decode
from relight.errors import CheckpointNotFound
from relight.format.records import Record
from relight.format.topics import SCHEDULE, TIER_PACE
from relight.log import History
from relight.policy.tiers import NOW
from relight.units import count_text, duration_text, percent_text


@click.command("log --why")
@click.argument("path", metavar="RUN")
@click.option(
    "--last",
    type=click.IntRange(min=1),
    default=20,
    show_default=True,
    metavar="N",
    help="Number of newest decisions to show.",
)
@json_option
def command(path: str, last: int, as_json: bool) -> int:
    """Explain why a run saved when it did: which save intervals relight.adaptive() chose, when, and why.

    Each decision is recorded in the run's log, with the numbers that led to it, and stays there after the run has ended.

    \b
    Examples:
      relight log runs/demo --why
      relight log runs/demo --why --last 3
    """
    opened = open_run_at(path, warnings=False)
    notes = decisions(opened.history)
    if not notes:
        hint = "Checkpointer(…, save=relight.adaptive()) decides, and writes down why"
        raise CheckpointNotFound("this run has no schedule of its own", where=path, hint=hint)
    shown = notes[-last:]
    if as_json:
        emit_json([_for_programs(record, note) for record, note in shown])
        return 0
    columns = ["when", "attempt", "step", "saves every", "foreseen"]
    if not any(note.numbers.get("foreseen") for _, note in shown):
        columns.pop()
    table(columns, [_row(*row)[: len(columns)] for row in shown], right=tuple(columns[1:]))
    if len(shown) < len(notes):
        click.echo(f"… and {count_text(len(notes) - len(shown), 'decision')} before them: --last {len(notes)}")
    _print_decision(shown[-1][1], opened.history)
    _print_paces(opened.history)
    return 0


def decisions(history: History) -> list[tuple[Record, ScheduleNote]]:
    """Return the schedule decisions in the log, oldest first."""
    decoded = [(record, decode(data)) for record, data in SCHEDULE.among(history.notes)]
    return [(record, note) for record, note in decoded if note is not None]


def _row(record: Record, note: ScheduleNote) -> list[object]:
    foreseen = note.numbers.get("foreseen", 0.0)
    return [
        since(record.time),
        record.epoch,
        note.step,
        duration_text(note.interval_s),
        percent_text(foreseen) if foreseen else "–",
    ]


def _print_decision(note: ScheduleNote, history: History) -> None:
    """Print the newest decision, part by part."""
    head, _, numbers = note.reason.partition("; ")
    every, _, why = head.partition(": ")
    click.echo(f"\nthe last of them, from step {note.step} on, {every}:")
    for part in [why, *(part for clause in numbers.split("; ") for part in clause.split(", "))]:
        if part:
            click.echo(f"  - {part}")
    numbers_of = note.numbers
    facts: list[tuple[str, object]] = [
        (label, duration_text(numbers_of[name]))
        for name, label in (
            ("young_s", "Young"),
            ("daly_s", "Daly"),
            ("wanted_s", "least lost"),
            ("floor_s", "no shorter"),
        )
        if name in numbers_of
    ]
    if "waste" in numbers_of:
        facts.append(("expected loss", f"{percent_text(numbers_of['waste'])} of the time"))
    click.echo()
    facts_list(facts)
    saved = [checkpoint for checkpoint in history.live if checkpoint.step > note.step]
    click.echo(f"\n{count_text(len(saved), 'live checkpoint')} of later steps")


def _print_paces(history: History) -> None:
    """Print the last recorded pace of each further tier, with its reason."""
    notes = [data for _, data in TIER_PACE.among(history.notes)]
    paces = next((data for data in reversed(notes) if NOW not in data), {})
    for name, why in paces.items():
        if name.endswith(".why"):
            click.echo(f"\ntier {name.removesuffix('.why')}: {escape(str(why))}")
    if paces and NOW in notes[-1]:
        click.echo("\nsince then every save is copied: a caller waited for a save on all tiers")


def _for_programs(record: Record, note: ScheduleNote) -> dict[str, Any]:
    return {
        "time": record.time, "epoch": record.epoch, "step": note.step, "interval_s": note.interval_s, "reason": note.reason,
        "numbers": dict(note.numbers),
    }  # fmt: skip
