"""``relight bench``: measure what saving costs here, and recommend settings."""

from __future__ import annotations

from pathlib import Path

import click

from relight.bench import BenchOptions, BenchReport, Figure, run
from relight.bench.plan import state_size
from relight.cli.common import drawn, json_option, plot_option
from relight.cli.output import emit_json, escape, facts_list, paint, table, warn
from relight.observe.progress_bar import progress_bar
from relight.units import duration_text, rate_text, size_text


@click.command("bench")
@click.argument("store", default="runs")
@click.option(
    "--size", metavar="BYTES", help="Size of the state, such as 256MB or 1.5GB; by default for about a minute."
)
@click.option(
    "--tensors",
    type=click.IntRange(min=1),
    metavar="N",
    help="Number of tensors of equal size; by default as in a GPT.",
)
@click.option(
    "--rounds",
    type=click.IntRange(min=1),
    default=5,
    show_default=True,
    help="Number of rounds; each measures everything once.",
)
@plot_option("Draw how near the floors Relight is.")
@json_option
def command(store: str, size: str | None, tensors: int | None, rounds: int, plot: Path | None, as_json: bool) -> None:
    """Measure this machine and STORE, a directory on the disk to measure, and recommend settings.

    The machine's floors (copying, hashing, writing, reading) and Relight's saves and restores are measured in turn. Figures
    are medians; ratios compare the same round. Everything is written to a new directory in STORE, which is removed at the
    end, also after Ctrl-C. Without torch only floors and the writing of packs are measured.

    \b
    Examples:
      relight bench
      relight bench /scratch/runs --size 4GB --tensors 1000
    """
    report = run(BenchOptions(store, None if size is None else state_size(size), tensors, rounds, progress_bar))
    if as_json:
        emit_json(report.to_dict())
    else:
        _print(report)
    if plot is not None:
        from relight.bench.plot import draw

        draw(report, plot)
        drawn(plot)


def _print(report: BenchReport) -> None:
    tensors = f" in {report.tensors:,} tensors" if report.tensors else ""
    rounds = f"median of {report.rounds} rounds" if report.rounds > 1 else "one round"
    click.echo(
        f"a state of {size_text(report.state_bytes)}{tensors}, {rounds}, {report.machine['cores']} cores, {escape(report.store)}\n"
    )
    # lists a floor once if one thread is as fast as many
    floors = {figure.label: figure for figure in report.floors}.values()
    rows: list[list[object]] = [_row(figure, "", "") for figure in floors]
    for figure in report.relight:
        ratio = "" if figure.ratio is None else f"{figure.ratio:.2f} ×"
        rows.append(_row(figure, ratio, figure.against))
    table(["", "time", "rate", "times", "its floor"], rows, right=("time", "rate", "times"), wrap=("", "its floor"))
    click.echo(f"\n{paint('Settings', 'bold')}")
    facts_list(
        [
            (setting.name, f"{setting.value}: {setting.reason}" if setting.value else setting.reason)
            for setting in report.advice.settings
        ]
    )
    click.echo(f"\n{report.advice.line}")
    for note in report.notes:
        warn(escape(note))


def _row(figure: Figure, ratio: str, against: str) -> list[object]:
    speed = "" if figure.name == "save_blocked" else rate_text(figure.bytes_per_second)
    return [
        figure.label,
        duration_text(figure.seconds),
        speed,
        ratio,
        against,
    ]
