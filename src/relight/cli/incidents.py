"""``relight incidents``: show a run's failures, the decisions and their costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from relight.cli.common import json_option, open_run_at
from relight.cli.output import Styled, emit_json, escape, facts_list, since, table
from relight.errors import CheckpointNotFound
from relight.supervise.incidents import Incident, incidents_in, read_incidents
from relight.units import duration_text


@click.command("incidents")
@click.argument("path")
@click.argument("which", required=False)
@json_option
def command(path: str, which: str | None, as_json: bool) -> int:
    """Show the failures of a run under relight run, what was done about them, and what they cost.

    PATH is a run, or a directory with incidents of relight run. WHICH shows one in full: clues, the state of every rank, its last lines,
    the stacks. It is "latest", or an incident's id: the letters that the list shows are its end, and enough.

    \b
    Examples:
      relight incidents runs/demo
      relight incidents runs/demo latest
      relight incidents runs/demo 6b1079
    """
    incidents = incidents_at(path)
    if which is not None:
        incidents = (
            [incidents[-1]]
            if which == "latest" and incidents
            else [incident for incident in incidents if incident.id.startswith(which) or incident.id.endswith(which)]
        )
        if not incidents:
            raise CheckpointNotFound(f"no incident {which!r}", where=path, hint="relight incidents RUN lists them")
    if as_json:
        emit_json([msgspec.to_builtins(incident) for incident in incidents])
    elif which is not None:
        for incident in incidents:
            _show(incident)
    elif not incidents:
        click.echo("no incident yet")
    else:
        table(
            ["id", "when", "kind", "step", "done", "lost", "down", "why"],
            [_row(incident) for incident in incidents],
            right=("step", "lost", "down"), wrap=("why",),
        )  # fmt: skip
    return 0


def incidents_at(path: str) -> list[Incident]:
    """Return the incidents of a run, or of a directory of ``relight run``, oldest first."""
    if Path(path).is_dir() and (incidents := incidents_in(Path(path))):
        return incidents
    opened = open_run_at(path, warnings=False)
    return read_incidents(opened.run.store, opened.run.name)


def _row(incident: Incident) -> list[object]:
    after = incident.after
    style = "red" if incident.action in ("stop",) else ""
    return [
        incident.id[-6:], since(incident.at), incident.kind, incident.step if incident.step >= 0 else "-", Styled(incident.action, style),
        "-" if after is None else after.steps_lost, "-" if after is None else duration_text(after.seconds.get("all", 0)), incident.why,
    ]  # fmt: skip


def _show(incident: Incident) -> None:
    facts: list[tuple[str, object]] = [
        ("incident", incident.id), ("when", incident.at), ("host", incident.host), ("job", incident.job),
        ("life", incident.life), ("kind", incident.kind), ("why", incident.why),
        ("step", incident.step), ("done", incident.action), ("reason", incident.reason),
    ]  # fmt: skip
    if incident.settings:
        facts.append(("settings", " ".join(f"{name}={value}" for name, value in incident.settings.items())))
    if incident.after is not None:
        parts = ", ".join(f"{name} {duration_text(value)}" for name, value in incident.after.seconds.items())
        facts += [
            ("restored", incident.after.restored),
            ("lost", f"{incident.after.steps_lost} steps"),
            ("took", parts),
        ]
    facts_list(facts)
    click.echo("\nclues, the strongest first:")
    clues = [[clue["kind"], clue["weight"], clue["what"]] for clue in incident.clues]
    table(["kind", "weight", "what"], clues, right=("weight",), wrap=("what",))
    click.echo("\nranks:")
    columns = ["rank", "exit", "phase", "step", "durable", "error"]
    table(columns, [_rank(worker) for worker in incident.workers], right=("rank", "exit", "step"), wrap=("error",))
    for rank, text in incident.stacks.items():
        click.echo(f"\nstacks of rank {rank}:")
        for line in text.splitlines():
            click.echo(f"  {escape(line)}")


def _rank(worker: dict[str, Any]) -> list[object]:
    ended = "stopped" if worker.get("stopped") else worker.get("exit")
    message = worker.get("error") or (worker.get("tail") or [""])[-1]
    return [
        worker["rank"],
        ended,
        worker.get("phase", "-"),
        worker.get("step", "-"),
        worker.get("durable", "-"),
        message,
    ]
