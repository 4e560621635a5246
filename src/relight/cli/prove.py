"""``relight prove``: does a training script resume to the bit?"""

from __future__ import annotations

import click

from relight.catalog import Run
from relight.catalog.proofs import PROVED, Proof, remember_proof
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, table, warn
from relight.errors import RelightError
from relight.policy.compact import Compact, lossy_of, with_asked
from relight.prove import ProveOptions, ProveReport, run


@click.command("prove", context_settings={"allow_interspersed_args": False})
@click.option("-n", "n", type=click.IntRange(min=1), default=5, show_default=True, help="Steps before the kill.")
@click.option("-k", "k", type=click.IntRange(min=1), default=3, show_default=True, help="Steps after the resume.")
@click.option("--keep", type=click.Path(file_okay=False), help="Keep traces, logs and the store here.")
@click.option("--lossy", multiple=True, metavar="PATTERN=WAY", help="Store such tensors inexactly, and show what it does.")
@click.option("--remember", metavar="RUN", default="", help="With which run: relight ready says how long ago it was.")
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    n: int, k: int, keep: str | None, lossy: tuple[str, ...], remember: str, as_json: bool, script: str, args: tuple[str, ...]
) -> int:
    """Does SCRIPT resume to the bit? What follows SCRIPT is its own.

    Runs it N+K steps straight, and N, SIGKILL, resume, K; compares every tensor, value, random number, sample and batch, step
    by step; names the first thing that differs. The script's own store is not touched. Exit code 1 if something differs.

    With --lossy the run that is killed stores tensors whose names fit PATTERN as bfloat16, float16 or int8, or with an error of at most
    a number such as 1e-4 or a share such as 0.1%; how far off the metrics are behind the resume, step by step, is then the answer.

    \b
    Example:
      relight prove -n 20 -k 5 train.py --batch-size 8
    """
    with_asked(Compact(), lossy_of(" ".join(lossy)))
    mine = open_run_at(remember, warnings=False).run if remember else None
    args = args[1:] if args[:1] == ("--",) else args
    report = run(ProveOptions(script, args, n, k, keep, lossy, say=lambda text: click.echo(text, err=True)))
    if mine is not None:
        _remember(mine, report, script)
    if as_json:
        emit_json(report.to_dict())
    elif report.drift:
        table(
            ["step", "metric", "straight", "resumed", "off by"],
            [[one.step, one.metric, f"{one.straight:.8g}", f"{one.resumed:.8g}", f"{one.relative:.2e}"] for one in report.drift],
            right=("step", "straight", "resumed", "off by"),
        )
        click.echo(f"{report.steps_compared} steps behind the resume; at most {max(one.relative for one in report.drift):.2e} off")
    elif report.ok:
        compared = f"{report.things_compared} things compared"
        click.echo(f"exact: {report.steps_compared} steps after the resume equal the straight run's, {compared}")
    elif report.difference:
        found = report.difference
        click.echo(f"NOT exact: {escape(found.what)} differs {found.when}")
        click.echo(f"  {found.cause}")
        if found.also:
            click.echo(f"  also differ: {escape(', '.join(found.also[:8]))}{' …' if len(found.also) > 8 else ''}")
    return 0 if report.ok else 1


def _remember(mine: Run, report: ProveReport, script: str) -> None:
    """What was shown is shown, whether or not it can be written down."""
    say = f"{report.steps_compared} steps of {script} after a resume equal the straight run's"
    if report.difference is not None:
        say = f"{script} does not resume exactly: {report.difference.what} differs {report.difference.when}"
    elif report.drift:
        say = f"{script} was resumed from tensors that were stored inexactly"
    try:
        remember_proof(mine.store, mine.name, Proof(PROVED, report.ok and not report.drift, say))
    except RelightError as error:
        warn(f"it could not be remembered with the run: {error.what}")
