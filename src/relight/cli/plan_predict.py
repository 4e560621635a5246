"""``relight plan predict``: train and evaluate the prediction of failures."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relight.cli.common import drawn, json_option, plot_option
from relight.cli.output import emit_json, table
from relight.errors import ConfigError
from relight.units import duration_text, parse_duration

if TYPE_CHECKING:
    from relight.prediction.history import RecordedRun
    from relight.prediction.score import AlarmCosts, Result
    from relight.prediction.trace import Happened


@click.group("plan predict")
def command() -> None:
    """Predict failures: train on histories of nodes, and evaluate the benefit.

    Detectors are fixed rules, an isolation forest, and a small network. Each is evaluated on held-out runs: found
    failures, false alarms, and seconds saved, which can be fewer than those spent.

    \b
    Examples:
      relight plan predict train nodes.model
      relight plan predict eval nodes.model --plot worth.png
    """


def _number_option(
    name: str, least: float, default: float, help_text: str, most: float | None = None
) -> Callable[..., Any]:
    return click.option(name, type=click.FloatRange(least, most), default=default, show_default=True, help=help_text)


def _shared(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option(
            "--recordings",
            type=click.Path(exists=True, file_okay=False, path_type=Path),
            metavar="DIR",
            help="Also use recordings.",
        ),
        click.option(
            "--seed", type=click.IntRange(0, (1 << 32) - 1), default=0, show_default=True, help="Random seed."
        ),
        _number_option("--precision", 0, 0.5, "Required share of true alarms.", 1),
        _number_option("--save-seconds", 0, 5.0, "Cost of one more save."),
        _number_option("--every-seconds", 1, 1800.0, "Interval of regular saves."),
        _number_option("--failures-per-day", 0, 0.02, "Real failure rate of one node."),
        json_option,
    ):
        function = option(function)
    return function


class HistoryOptions(NamedTuple):
    """Options of histories that other tools have measured."""

    url: str | None
    files: tuple[Path, ...]
    incidents: tuple[str, ...]
    since: str
    until: str
    step_s: float
    auth: str
    node_label: str


def _history_options(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **given: Any) -> Any:
        return function(*args, history=HistoryOptions(*(given.pop(name) for name in HistoryOptions._fields)), **given)

    for option in (
        click.option("--from-prometheus", "url", metavar="URL", help="Also use metrics of nodes in this Prometheus."),
        click.option(
            "--from-dcgm", "files", type=click.Path(dir_okay=False, path_type=Path), multiple=True, metavar="FILE",
            help="Also use a file of dcgm-exporter or dcgmi dmon. Repeatable.",
        ),
        click.option(
            "--incidents", multiple=True, metavar="PATH", help="Failures in these: a run, or a directory. Repeatable."
        ),
        click.option("--since", metavar="TIME", default="7d", show_default=True, help="Begin of metrics, before now."),
        click.option("--until", metavar="TIME", default="0s", show_default=True, help="End of metrics, before now."),
        click.option(
            "--step", "step_s", type=click.FloatRange(1, 60), default=15.0, show_default=True, help="Seconds between samples."
        ),
        click.option("--auth", metavar="SPEC", default="", help="USER:PASSWORD or token, by env:NAME or file:PATH."),
        click.option("--node-label", metavar="NAME", default="", help="Label that names the node of a metric."),
    ):  # fmt: skip
        call = option(call)
    return call


@command.command("train")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--runs", type=click.IntRange(0, 20000), default=600, show_default=True, help="Number of simulated runs.")
@click.option(
    "--detectors",
    metavar="NAMES",
    default="rules,forest,lstm",
    show_default=True,
    help="Detectors, separated by commas.",
)
@click.option(
    "--epochs", type=click.IntRange(1, 1000), default=6, show_default=True, help="Training epochs of the network."
)
@click.option("--if-older", metavar="TIME", help="Train only if the model is older, such as 24h.")
@_history_options
@_shared
def train_model(
    model: Path,
    runs: int,
    detectors: str,
    epochs: int,
    if_older: str | None,
    recordings: Path | None,
    seed: int,
    precision: float,
    as_json: bool,
    history: HistoryOptions,
    **costs: float,
) -> None:
    """Train on simulated runs, recordings and other histories, and write MODEL.

    Three fifths of the runs train the detectors, one fifth sets each detector's threshold for the required precision, and one fifth is held
    out: MODEL contains the results on these. relight run reloads a model when its file changes.

    Histories are metrics of dcgm-exporter and node_exporter in a Prometheus, or files of DCGM. Failures in them are those of --incidents.

    \b
    Examples:
      relight plan predict train nodes.model --recordings incidents --if-older 24h
      relight plan predict train nodes.model --from-prometheus http://prom:9090 \\
        --since 14d --incidents runs/demo
    """
    from relight.prediction.learn import LearningPlan, train
    from relight.prediction.model import age_s

    if if_older is not None and age_s(model) <= _seconds(if_older, "--if-older"):
        emit_json({"model": str(model), "trained": False}) if as_json else click.echo(
            "nothing to do: the model is recent enough"
        )
        return
    names = tuple(name.strip() for name in detectors.split(",") if name.strip())
    plan = LearningPlan(runs, recordings, seed, precision, names, _costs(**costs), epochs)
    made, results = train(plan, _report, _runs_of(history))
    made.write(model)
    if as_json:
        emit_json({"model": str(model), "trained": True, "held_out": [result.to_dict() for result in results]})
    else:
        _print(results, plan.costs)


@command.command("eval")
@click.argument("model", type=click.Path(dir_okay=False, path_type=Path), required=False)
@click.option("--runs", type=click.IntRange(0, 20000), default=200, show_default=True, help="Number of simulated runs.")
@plot_option("Draw the results.")
@_shared
def evaluate_model(
    model: Path | None,
    runs: int,
    plot: Path | None,
    recordings: Path | None,
    seed: int,
    precision: float,
    as_json: bool,
    **costs: float,
) -> None:
    """Evaluate each detector of MODEL on held-out runs; without MODEL, the rules.

    An alarm is true if a failure follows within twenty minutes and leaves time for a save. "together" is what relight run would do: the
    rules, and the detectors that pay off on held-out runs.

    \b
    Example:
      relight plan predict eval nodes.model --runs 400 --seed 7
    """
    from relight.prediction.learn import evaluate, unseen, unseen_recordings
    from relight.prediction.model import read_model, without_model

    read, costs_ = (without_model() if model is None else read_model(model)), _costs(**costs)
    results_by_history = {}
    if runs:
        results_by_history["simulated"] = evaluate(read, unseen(seed, runs, _report), precision, costs_)
    if recordings is not None:
        results_by_history["recorded"] = evaluate(read, unseen_recordings(recordings, read), precision, costs_)
    if not results_by_history:
        raise ConfigError("there are no runs to evaluate", hint="--runs N, or --recordings DIR")
    if as_json:
        emit_json(
            {history: [result.to_dict() for result in results] for history, results in results_by_history.items()}
        )
    else:
        for history, results in results_by_history.items():
            click.echo(f"{history}: {results[0].days:.1f} node-days, {results[0].failures} failures")
            _print(results, costs_)
    if plot is not None:
        from relight.prediction.plot import draw

        draw(next(iter(results_by_history.values())), plot)
        drawn(plot)


def _runs_of(history: HistoryOptions) -> Iterator[tuple[str, RecordedRun]]:
    """Yield the runs of the histories, and the set of each."""
    from relight.prediction.dcgm import DcgmFiles
    from relight.prediction.imported import NodeHistory, imported
    from relight.prediction.prometheus import HistoryRange, PrometheusHistory

    if history.url is None and not history.files:
        return
    failures = _failures(history.incidents)
    if not failures:
        _report("no failures: without --incidents, the histories are examples of healthy nodes only")
    sources: list[NodeHistory] = []
    if history.files:
        sources.append(DcgmFiles(history.files, history.step_s, history.node_label))
    if history.url is not None:
        now = time.time()
        begin, end = now - _seconds(history.since, "--since"), now - _seconds(history.until, "--until")
        if begin >= end:
            raise ConfigError("--since is a longer time than --until", where=f"{history.since}, {history.until}")
        time_range = HistoryRange(begin, end, history.step_s)
        sources.append(PrometheusHistory(history.url, time_range, history.auth, history.node_label))
    for source in sources:
        yield from imported(source, failures, _report)


def _failures(paths: tuple[str, ...]) -> dict[str, list[Happened]]:
    """Return the failures of each node, by its short name. A failure of the script has no kind: it only ends a run of the node."""
    from relight.cli.incidents import incidents_at
    from relight.prediction.imported import short_name
    from relight.prediction.predictor import OF_THE_SCRIPT
    from relight.prediction.trace import Happened

    failures: dict[str, list[Happened]] = {}
    for incident in [incident for path in paths for incident in incidents_at(path)]:
        is_here = incident.rank in (None, *(worker.get("rank") for worker in incident.workers))
        kind = incident.kind if is_here and incident.kind not in OF_THE_SCRIPT else ""
        failures.setdefault(short_name(incident.host), []).append(Happened(incident.time_s, kind))
    return failures


def _report(text: str) -> None:
    click.echo(text, err=True)


def _print(results: list[Result], costs: AlarmCosts) -> None:
    rows = [
        [result.detector, _number(result.threshold, ".2f"), _number(result.precision, ".2f"), f"{result.found}/{result.failures}",
         _number(result.lead_s, ".0f"), _number(result.false_per_day, ".2f"), _number(result.net_s_per_day, "+.0f"),
         _number(result.net_s_per_day_in_life, "+.2f")]
        for result in results
    ]  # fmt: skip
    head = ["detector", "from", "precision", "found", "warning s", "false/day", "net s/day", "in earnest"]
    table(head, rows, right=head[1:])
    causes = sorted({cause for result in results for cause in result.recall_by_cause})
    if causes:
        click.echo("")
        rows = [
            [result.detector, *(_share(result.recall_by_cause.get(cause)) for cause in causes)] for result in results
        ]
        table(["found of", *causes], rows, right=causes)
    click.echo(
        f"\nA save more costs {duration_text(costs.save_s)}; half of {duration_text(costs.every_s)} is lost at an unpredicted failure."
    )
    click.echo(f"In earnest: seconds a day with {costs.failures_per_day:g} failures of a node a day.")


def _number(value: float, shape: str) -> str:
    return "-" if math.isnan(value) else format(value, shape)


def _share(counts: tuple[int, int] | None) -> str:
    return "-" if counts is None else f"{counts[0]}/{counts[1]}"


def _costs(save_seconds: float, every_seconds: float, failures_per_day: float) -> AlarmCosts:
    from relight.prediction.score import AlarmCosts

    return AlarmCosts(save_seconds, every_seconds, failures_per_day)


def _seconds(text: str, option: str) -> float:
    value = parse_duration(text)
    if value is None:
        raise ConfigError(f"a time such as 30m, 24h or 7d, not {text[:40]!r}", where=option)
    return value
