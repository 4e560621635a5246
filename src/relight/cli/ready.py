"""``relight ready``: how ready is all of it for a run that matters? measured and graded."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from textwrap import fill

import click

from relight.cli.common import json_option
from relight.cli.doctor import status
from relight.cli.output import emit_json, escape, paint, plural, progress
from relight.doctor import Readiness, collect, grade, judge
from relight.doctor.bounded import BoundedProbe
from relight.doctor.facts import Drilled
from relight.doctor.ready import PARTS
from relight.log.identity import seconds_since_epoch
from relight.store import ByteStore

_COLOURS = {"A": "green", "B": "green", "C": "yellow", "D": "yellow", "F": "red", "–": "cyan"}


@click.command("ready")
@click.argument("path", default="runs")
@click.option("--measure", is_flag=True, help="Read the newest checkpoint as a restore does: up to 4 GiB, or a minute.")
@click.option("--all", "everything", is_flag=True, help="Also the lines in which nothing is to be done.")
@json_option
def command(path: str, measure: bool, everything: bool, as_json: bool) -> int:
    """Say how ready the store or run at PATH is for a run that matters: reliability, security, performance, scalability, operations.

    Each line is measured, weighed and graded from A to F, with what was seen and a command that would raise it. What could not be measured
    here is "–", and earns nothing. Exit code 1 for a grade below C.

    \b
    Examples:
      relight ready runs/demo
      relight ready runs/demo --measure --all
    """
    with progress("reading the newest checkpoint", _bytes_to_read(path) if measure else 0) as meter, status() as say:
        facts = collect(path, measure=measure, drills=_drills, say=say, progress=meter)
    facts = replace(facts, config=replace(facts.config, roles=_roles()))
    found = grade(facts, judge(facts))
    if as_json:
        emit_json({"path": path, **found.to_dict()})
    else:
        _show(path, found, everything)
    return 0 if found.grade() in ("A", "B", "C") else 1


def _drills(store: ByteStore, run: str) -> Sequence[Drilled]:
    """What is remembered of a run's drills."""
    from relight.drill.made_of import why_not
    from relight.drill.record import drills_of

    return [
        Drilled(
            seconds_since_epoch(one.at), one.ok, one.summary(),
            one.made_of.script[0] if one.made_of is not None and one.made_of.script else "", why_not(one.made_of),
        )
        for one in drills_of(store, run) if not one.copies
    ]  # fmt: skip


def _roles() -> dict[str, int] | None:
    """Valid tokens of this user's dashboard by role; None if it has none. The file is not made, nor changed."""
    import sqlite3
    import time

    from relight.serve.state import default_path

    try:
        with contextlib.closing(sqlite3.connect(f"file:{default_path()}?mode=ro", uri=True, timeout=1.0)) as found:
            asked = "SELECT role, count(*) FROM tokens WHERE revoked IS NULL AND (ends IS NULL OR ends > ?) GROUP BY role"
            return {str(role)[:20]: int(count) for role, count in found.execute(asked, (time.time(),))} or None
    except sqlite3.Error:
        return None


def _bytes_to_read(path: str) -> int:
    """How long the bar is; none if that cannot be told, which the looking itself will say."""
    from relight.cli.common import open_run_at

    return BoundedProbe().at("size", lambda: sum(one.body.stored_bytes for one in open_run_at(path, warnings=False).history.live[-1:]), 0)


def _show(path: str, found: Readiness, everything: bool) -> None:
    for part in PARTS:
        lines = [one for one in found.lines if one.part == part]
        shown = [one for one in lines if everything or one.score != 1.0]
        click.echo(f"{_painted(found.grade(part))}  {paint(part, 'bold')}")
        for one in shown:
            head = f"   {_painted(one.grade)}  {one.name} ({one.weight}): "
            click.echo(fill(escape(one.evidence)[:300], 84, initial_indent=head, subsequent_indent=" " * 6, break_long_words=False))
            if one.command:
                click.echo(f"      → {escape(one.command)}")
        if len(lines) > len(shown):
            click.echo(f"      {plural(len(lines) - len(shown), 'line')} with nothing to do")
        click.echo()
    missing = f"; {plural(len(found.unmeasured), 'line')} could not be measured here" if found.unmeasured else ""
    by = f" (by its run {escape(found.run)})" if found.run.rstrip("/") not in ("", path.split("@")[0].rstrip("/")) else ""
    click.echo(f"{escape(path)}{by}: {_painted(found.grade())}, {found.score():.0%} of {plural(len(found.lines), 'line')}{missing}")


def _painted(letter: str) -> str:
    return paint(letter, _COLOURS[letter])
