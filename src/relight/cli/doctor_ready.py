"""``relight doctor --ready``: state what store and run lack for an important job."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill

import click

from relight.cli.common import json_option
from relight.cli.doctor import status
from relight.cli.output import emit_json, escape, paint
from relight.doctor import Readiness, collect, grade, judge
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import Drilled
from relight.doctor.ready import PARTS
from relight.log.identity import seconds_since_epoch
from relight.observe.progress_bar import progress_bar
from relight.store import ByteStore
from relight.units import count_text, percent_text

LACKING_SHOWN = 6
_COLOURS = {"A": "green", "B": "green", "C": "yellow", "D": "yellow", "F": "red", "–": "cyan"}


@click.command("doctor --ready")
@click.argument("path", default="runs")
@click.option("--measure", is_flag=True, help="Read the newest checkpoint as a restore does: up to 4 GiB, or a minute.")
@click.option("--all", "everything", is_flag=True, help="Also show lines without anything to do.")
@json_option
def command(path: str, measure: bool, everything: bool, as_json: bool) -> int:
    """State what the store or run at PATH lacks for an important job: reliability, security, performance, scalability, operations.

    Each line is measured, weighted and graded from A to F, with the evidence and a command that would raise the grade. What could not be
    measured here is "–", and earns nothing. Exit code 1, "not ready", for a grade below C.

    \b
    Examples:
      relight doctor runs/demo --ready
      relight doctor runs/demo --ready --measure --all
    """
    with (
        progress_bar("reading the newest checkpoint", _bytes_to_read(path) if measure else 0) as meter,
        status() as on_stage,
    ):
        facts = collect(path, measure=measure, drills=_drills, on_stage=on_stage, progress=meter)
    facts = replace(facts, config=replace(facts.config, roles=_roles()))
    readiness = grade(facts, judge(facts))
    if as_json:
        emit_json({"path": path, **readiness.to_dict()})
    else:
        _show(path, readiness, everything)
    return 0 if readiness.is_ready else 1


def _drills(store: ByteStore, run: str) -> Sequence[Drilled]:
    """Return the recorded drills of a run."""
    from relight.drill.made_of import why_not
    from relight.drill.record import drills_of

    return [
        Drilled(
            seconds_since_epoch(drill.at),
            drill.ok,
            drill.summary(),
            drill.made_of.script[0] if drill.made_of is not None and drill.made_of.script else "",
            why_not(drill.made_of),
        )
        for drill in drills_of(store, run)
        if not drill.copies
    ]


def _roles() -> dict[str, int] | None:
    """Return the number of valid tokens of this user's dashboard, by role; None without any. The file is neither created nor changed."""
    import sqlite3
    import time

    from relight.serve.state import default_path

    try:
        with contextlib.closing(sqlite3.connect(f"file:{default_path()}?mode=ro", uri=True, timeout=1.0)) as database:
            asked = (
                "SELECT role, count(*) FROM tokens WHERE revoked IS NULL AND (ends IS NULL OR ends > ?) GROUP BY role"
            )
            return {str(role)[:20]: int(count) for role, count in database.execute(asked, (time.time(),))} or None
    except sqlite3.Error:
        return None


def _bytes_to_read(path: str) -> int:
    """Return the bytes for the progress bar; 0 if unknown. ``collect`` reports the reason later."""
    from relight.cli.common import open_run_at

    return BoundedProbe().at(
        "size",
        lambda: sum(checkpoint.body.stored_bytes for checkpoint in open_run_at(path, warnings=False).history.live[-1:]),
        0,
    )


def _show(path: str, readiness: Readiness, everything: bool) -> None:
    for part in PARTS:
        lines = [line for line in readiness.lines if line.part == part]
        shown = [line for line in lines if everything or line.score != 1.0]
        click.echo(f"{_painted(readiness.grade(part))}  {paint(part, 'bold')}")
        for line in shown:
            head = f"   {_painted(line.grade)}  {line.name} ({line.weight}): "
            click.echo(
                fill(
                    escape(line.evidence)[:300],
                    84,
                    initial_indent=head,
                    subsequent_indent=" " * 6,
                    break_long_words=False,
                )
            )
            if line.command:
                click.echo(f"      → {escape(line.command)}")
        if len(lines) > len(shown):
            click.echo(f"      {count_text(len(lines) - len(shown), 'line')} with nothing to do")
        click.echo()
    by = (
        f" (by its run {escape(readiness.run)})"
        if readiness.run.rstrip("/") not in ("", path.split("@")[0].rstrip("/"))
        else ""
    )
    verdict = paint("ready", "green") if readiness.is_ready else paint("not ready", "red")
    click.echo(
        f"{escape(path)}{by}: {verdict} for an important job, grade {_painted(readiness.grade())}, "
        f"{percent_text(readiness.score(), 0)} of the possible score"
    )
    if readiness.unmeasured:
        click.echo(
            f"{len(readiness.unmeasured)} of {count_text(len(readiness.lines), 'line')} could not be measured here"
        )
    if readiness.lacking:
        more = f" and {len(readiness.lacking) - LACKING_SHOWN} more" if len(readiness.lacking) > LACKING_SHOWN else ""
        click.echo(fill(f"it lacks: {', '.join(readiness.lacking[:LACKING_SHOWN])}{more}", 84, subsequent_indent="  "))


def _painted(letter: str) -> str:
    return paint(letter, _COLOURS[letter])
