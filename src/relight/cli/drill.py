"""``relight drill``."""

from __future__ import annotations

from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import Styled, emit_json, escape, table
from relight.drill import DrillOptions, DrillReport, Outcome, run
from relight.drill.report import FAILED, PASSED, SKIPPED, markdown, seconds_text
from relight.drill.target import target_of

_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
_STYLES = {PASSED: "green", FAILED: "red", SKIPPED: "yellow"}


@click.command("drill", context_settings=_SETTINGS)
@click.option("--only", metavar="NAMES", default="", help="Of the rehearsals these, parted by commas.")
@click.option("--env", multiple=True, metavar="NAME=VALUE", help="For the script; {store} in VALUE is the drill's store.")
@click.option("--settings", type=click.Path(dir_okay=False, exists=True), default="", help="As of relight run.")
@click.option("--max-lost-steps", type=click.IntRange(min=0), metavar="N", help="More than that fails.")
@click.option("--max-seconds", type=click.FloatRange(min=0), metavar="S", help="So long until training goes on; longer fails.")
@click.option("--timeout", type=click.FloatRange(min=1), default=300.0, show_default=True, metavar="S", help="For one rehearsal.")
@click.option("--deadline", type=click.FloatRange(min=1), default=3600.0, show_default=True, metavar="S", help="For all.")
@click.option("--report", type=click.Path(dir_okay=False, path_type=Path), help="Write what came of it here, as Markdown.")
@click.option("--keep", type=click.Path(file_okay=False, path_type=Path), help="Leave stores and logs here.")
@json_option
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED, metavar="[TORCHRUN'S FLAGS] [SCRIPT [ARGS]…]")
def command(
    only: str, env: tuple[str, ...], settings: str, max_lost_steps: int | None, max_seconds: float | None, timeout: float,
    deadline: float, report: Path | None, keep: Path | None, as_json: bool, arguments: tuple[str, ...],
) -> int:  # fmt: skip
    """Break a job on purpose, and see whether it goes on as it should.

    Without SCRIPT a small training of its own.

    \b
    Examples:
      relight drill
      relight drill --only kill,hang --nproc-per-node 8 train.py --store {store}
    """
    names = [one.strip() for one in only.split(",") if one.strip()]
    target = target_of(arguments, str(Path(settings).resolve()) if settings else "", env)
    options = DrillOptions(
        target=target, only=names, max_lost_steps=max_lost_steps, max_seconds=max_seconds, timeout_s=timeout, deadline_s=deadline,
        keep=keep, say=_say,
    )  # fmt: skip
    done = run(options)
    if report is not None:
        report.write_text(markdown(done), encoding="utf-8")
    if as_json:
        emit_json(done.to_dict())
    else:
        _show(done)
    return 0 if done.ok else 1


def _say(name: str, outcome: Outcome | None) -> None:
    """As they go, on standard error."""
    if outcome is None:
        click.echo(f"{name} …", err=True)
    else:
        click.echo(f"{name}: {outcome.verdict}, {outcome.took_s:.0f} s", err=True)


def _show(done: DrillReport) -> None:
    rows = [
        [
            one.name, Styled(one.verdict, _STYLES[one.verdict]), seconds_text(one.noticed_s), seconds_text(one.decided_s),
            seconds_text(one.back_s), "–" if one.steps_lost is None else one.steps_lost,
        ]
        for one in done.outcomes
    ]  # fmt: skip
    table(["rehearsal", "", "noticed", "decided", "back", "lost"], rows, right=("noticed", "decided", "back", "lost"))
    for one in done.outcomes:
        if one.verdict != PASSED:
            click.echo(f"{one.name}: {escape(one.why)}")
    click.echo(done.summary())
