"""``relight drill --prove``: check whether a training script resumes bit-exactly."""

from __future__ import annotations

import click

from relight.catalog import Run
from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, escape, table, warn
from relight.errors import RelightError
from relight.policy.compact import Compact, lossy_of, with_asked
from relight.prove import ProveOptions, ProveReport, run
from relight.run_records.proofs import PROVED, Proof, remember_proof


@click.command("drill --prove", context_settings={"allow_interspersed_args": False})
@click.option("-n", "n", type=click.IntRange(min=1), default=5, show_default=True, help="Steps before the kill.")
@click.option("-k", "k", type=click.IntRange(min=1), default=3, show_default=True, help="Steps after the resume.")
@click.option(
    "--keep", type=click.Path(file_okay=False), help="Keep traces, logs and the store in this new or empty directory."
)
@click.option(
    "--lossy", multiple=True, metavar="PATTERN=WAY", help="Store matching tensors lossily, and show the effect."
)
@click.option(
    "--remember", metavar="RUN", default="", help="Record the result with this run, for relight doctor --ready."
)
@json_option
@click.argument("script")
@click.argument("args", nargs=-1, type=click.UNPROCESSED)
def command(
    n: int,
    k: int,
    keep: str | None,
    lossy: tuple[str, ...],
    remember: str,
    as_json: bool,
    script: str,
    args: tuple[str, ...],
) -> int:
    """Check whether SCRIPT resumes bit-exactly. What follows SCRIPT are its own arguments.

    Runs it for N+K steps without interruption, and for N steps, SIGKILL, resume, K steps. Compares every tensor, value, random
    number, sample and batch, step by step, and names the first difference. The script's own store is not touched. Exit code 1
    if something differs.

    With --lossy the killed run stores tensors whose names match PATTERN as bfloat16, float16 or int8, or with an error of at most a number
    such as 1e-4 or a share such as 0.1%. The result is then how far the metrics are off after the resume, step by step.

    \b
    Example:
      relight drill --prove -n 20 -k 5 train.py --batch-size 8
    """
    with_asked(Compact(), lossy_of(" ".join(lossy)))
    mine = open_run_at(remember, warnings=False).run if remember else None
    args = args[1:] if args[:1] == ("--",) else args
    report = run(ProveOptions(script, args, n, k, keep, lossy, on_stage=lambda text: click.echo(text, err=True)))
    if mine is not None:
        _remember(mine, report, script)
    if as_json:
        emit_json(report.to_dict())
    elif report.drift:
        table(
            ["step", "metric", "straight", "resumed", "relative"],
            [
                [row.step, row.metric, f"{row.straight:.8g}", f"{row.resumed:.8g}", f"{row.relative:.2e}"]
                for row in report.drift
            ],
            right=("step", "straight", "resumed", "relative"),
        )
        click.echo(
            f"{report.steps_compared} steps after the resume; "
            f"at most {max(row.relative for row in report.drift):.2e} off, relative to the value"
        )
    elif report.ok:
        compared = f"{report.things_compared} things compared"
        click.echo(f"exact: {report.steps_compared} steps after the resume equal the straight run's, {compared}")
    elif report.difference:
        difference = report.difference
        click.echo(f"NOT exact: {escape(difference.what)} differs {difference.when}")
        click.echo(f"  {difference.cause}")
        if difference.also:
            click.echo(
                f"  also differ: {escape(', '.join(difference.also[:8]))}{' …' if len(difference.also) > 8 else ''}"
            )
    return 0 if report.ok else 1


def _remember(run: Run, report: ProveReport, script: str) -> None:
    """Record the result with the run. If that fails, warn only: the result is printed anyway."""
    summary = f"{report.steps_compared} steps of {script} after a resume equal the straight run's"
    if report.difference is not None:
        summary = f"{script} does not resume exactly: {report.difference.what} differs {report.difference.when}"
    elif report.drift:
        summary = f"{script} was resumed from tensors that were stored inexactly"
    try:
        remember_proof(run.store, run.name, Proof(PROVED, report.ok and not report.drift, summary))
    except RelightError as error:
        warn(f"the result could not be recorded with the run: {error.what}")
