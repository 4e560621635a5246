"""``relight plan``: compute what saving a model costs, how often to save, how much is lost."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from relight.cli.common import drawn, json_option, open_run_at, plot_option
from relight.cli.output import emit_json, escape, facts_list, paint, table
from relight.cost_model import PUBLISHED, Belief, prior
from relight.cost_model.planned import JobPlan, KnownNumber, MeasuredTime, ParallelLayout, Question, fit, plan
from relight.cost_model.schedule import costly
from relight.cost_model.sizing import OPTIMIZERS, PRECISIONS, Size, from_config, from_count, size_of
from relight.errors import ConfigError
from relight.settings.amounts import bytes_of, seconds_of
from relight.units import count_text, duration_text, percent_text, rate_text, size_text

_BYTES_MAX = 16 << 20
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?[kKmMbBtT]?\Z")
_FIGURES = {"stall": "save_lost", "durable": "save_durable", "load": "restore_cold"}
"""Figures of ``relight bench --json`` that a plan uses."""
_ROLES = {"param": "weights", "buffer": "weights", "optim": "optimizer"}


@click.command("plan")
@click.argument("model")
@click.option(
    "--gpus", type=click.IntRange(1, 10**7), default=1, show_default=True, metavar="N", help="GPUs of the job."
)
@click.option(
    "--per-node", type=click.IntRange(1, 1024), default=8, show_default=True, metavar="N", help="GPUs of one node."
)
@click.option("--tp", type=click.IntRange(1, 10**6), default=1, metavar="N", help="Tensor parallelism.")
@click.option("--pp", type=click.IntRange(1, 10**6), default=1, metavar="N", help="Pipeline parallelism.")
@click.option(
    "--zero", type=click.IntRange(0, 3), default=3, show_default=True, help="What data parallelism shards; 3 is FSDP."
)
@click.option("--precision", type=click.Choice(list(PRECISIONS)), default="bf16", show_default=True)
@click.option("--optimizer", type=click.Choice(list(OPTIMIZERS)), default="adamw", show_default=True)
@click.option("--mtbf", metavar="TIME", help="Mean time between the job's failures; by default published rates.")
@click.option(
    "--rates",
    default="published",
    show_default=True,
    metavar="NAME",
    help=f"Failure rates: published, hardware, {', '.join(PUBLISHED)}.",
)
@click.option("--restart", metavar="TIME", help="From a failure until processes are up and begin to load.")
@click.option("--copy", "copy_", metavar="SIZE", help="Bytes a second from a GPU to its host's memory.")
@click.option("--link", metavar="SIZE", help="Bytes a second from one node to another or to the store.")
@click.option("--store-write", metavar="SIZE", help="Bytes a second that the store accepts from all nodes together.")
@click.option("--store-read", metavar="SIZE", help="Bytes a second that the store delivers to all nodes together.")
@click.option(
    "--levels", default="memory,peers,store", show_default=True, metavar="LIST", help="Where restores may read from."
)
@click.option(
    "--window", default="60s", show_default=True, metavar="TIME", help="Time in which a save, or a load, must finish."
)
@click.option(
    "--keep",
    type=click.IntRange(1, 10**6),
    default=3,
    show_default=True,
    metavar="N",
    help="Checkpoints that stay in the store.",
)
@click.option(
    "--gpu-price", type=click.FloatRange(0, 1e6), metavar="X", help="Price of a GPU for an hour, in any currency."
)
@click.option(
    "--store-price", type=click.FloatRange(0, 1e6), metavar="X", help="Price of a TB in the store for a month."
)
@click.option("--stored", metavar="RUN", help="Take the stored share of the bytes from this run's checkpoints.")
@click.option("--at-least", metavar="TIME", help="The shortest interval between saves, as of relight.adaptive().")
@click.option("--at-most", metavar="TIME", help="The longest interval; the plan shows the cost of both bounds.")
@click.option("--stall", metavar="TIME", help="Time that a save stalls training; by default copying to the host.")
@click.option("--durable", metavar="TIME", help="From a save's beginning until it is in the store.")
@click.option(
    "--measured",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="JSON",
    help="Output of relight bench --json. Repeatable.",
)
@plot_option("Draw goodput against the interval.")
@json_option
def command(model: str, measured: tuple[Path, ...], plot: Path | None, as_json: bool, **given: Any) -> int:
    """Compute what saving a model costs: bytes, bandwidth, memory, stall, how often to save, how much time is lost.

    MODEL is a number of parameters (8B, 405B, 1T), a Hugging Face config.json or its folder, or a run or checkpoint of Relight. Every
    number has its source: given, measured, published or assumed.

    \b
    Examples:
      relight plan 70B --gpus 512 --mtbf 12h
      relight bench /scratch --json > here.json
      relight plan runs/demo --measured here.json --plot plan.png
      relight plan 70B --gpus 512 --store-price 20 --stored runs/demo
      relight plan 70B --gpus 4096 --stall 30m --at-most 1h
    """
    made, description = plan_for(model, measured=measured, **given)
    if as_json:
        emit_json(to_dict(made, description))
    else:
        show(made, description)
    if plot is not None:
        from relight.bench.plan_plot import draw

        draw(made, plot)
        drawn(plot)
    return 0


def plan_for(
    model: str,
    *,
    gpus: int = 1,
    per_node: int = 8,
    tp: int = 1,
    pp: int = 1,
    zero: int = 3,
    precision: str = "bf16",
    optimizer: str = "adamw",
    mtbf: str | None = None,
    rates: str = "published",
    restart: str | None = None,
    copy_: str | None = None,
    link: str | None = None,
    store_write: str | None = None,
    store_read: str | None = None,
    levels: str = "memory,peers,store",
    window: str = "60s",
    keep: int = 3,
    gpu_price: float | None = None,
    store_price: float | None = None,
    measured: Sequence[Path] = (),
    stored: str | None = None,
    at_least: str | None = None,
    at_most: str | None = None,
    stall: str | None = None,
    durable: str | None = None,
) -> tuple[JobPlan, str]:
    """Return the plan, and a description of its model."""
    state, description = model_size(model, precision, optimizer)
    belief = prior(gpus, source=rates)
    source = f"{rates} rates of {count_text(gpus, 'GPU')}"
    if mtbf is not None:
        belief, source = Belief(belief.shape, belief.shape * seconds_of(mtbf, "--mtbf")), "given"
    given = {"copy": copy_, "link": link, "store_write": store_write, "store_read": store_read}
    given_times = {
        name: MeasuredTime(seconds_of(text, f"--{name}"), 0.0, "given")
        for name, text in (("stall", stall), ("durable", durable))
        if text is not None
    }
    question = Question(
        size=state, layout=ParallelLayout(gpus, per_node, tp, pp, zero), belief=belief, rate_source=source,
        paces={name: float(bytes_of(text, f"--{name.replace('_', '-')}")) for name, text in given.items() if text is not None},
        measured=read_measured(measured) | given_times, start_s=None if restart is None else seconds_of(restart, "--restart"),
        levels=tuple(level.strip() for level in levels.split(",")), window_s=seconds_of(window, "--window"), kept=keep,
        gpu_hour=gpu_price, store_tb_month=store_price, stored=None if stored is None else stored_share(stored),
        at_least_s=0.0 if at_least is None else seconds_of(at_least, "--at-least"),
        at_most_s=None if at_most is None else seconds_of(at_most, "--at-most"),
    )  # fmt: skip
    return plan(question), description


def model_size(text: str, precision: str, optimizer: str) -> tuple[Size, str]:
    """Return the size and description of a model, from a number of parameters, a configuration or a run's checkpoint."""
    path = Path(text)
    if path.is_dir() and (path / "config.json").is_file():
        path = path / "config.json"
    if path.suffix == ".json" and path.is_file():
        try:
            data = path.read_bytes() if path.stat().st_size <= _BYTES_MAX else b""
            config = json.loads(data)
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(
                f"invalid JSON, or more than {size_text(_BYTES_MAX)}: {str(error)[:80]}", where=text
            ) from None
        if not isinstance(config, Mapping):
            raise ConfigError("a config.json is a JSON object", where=text)
        model = from_config(config, path.parent.name)
        return size_of(model, precision, optimizer), model.description
    if _NUMBER.match(text):
        model = from_count(text)
        return size_of(model, precision, optimizer), model.description
    return _of_run(text)


def _of_run(text: str) -> tuple[Size, str]:
    """Return the size of a run's newest checkpoint, or of the named one, and its description."""
    run_opened = open_run_at(text, warnings=False)
    opened = run_opened.run.open(run_opened.choose(None))
    parts: dict[str, int] = {}
    for part in opened.parts:
        for tensor in part.tensors:
            name = _ROLES.get(tensor.role, "other state")
            parts[name] = parts.get(name, 0) + tensor.length
    return Size(
        parts, "as the checkpoint has it"
    ), f"checkpoint {opened.root.id}, step {opened.root.step} of {run_opened.run.name}"


def stored_share(text: str) -> KnownNumber:
    """Return the bytes that a run's live checkpoints store over the bytes of their states, from the records in its log."""
    opened = open_run_at(text, warnings=False)
    bodies = [body.body for body in opened.history.live if body.body.logical_bytes > 0]
    if not bodies:
        raise ConfigError(
            "no checkpoint of this run records its size", where=text, hint="save the run once, then name it again"
        )
    share = sum(body.new_bytes for body in bodies) / sum(body.logical_bytes for body in bodies)
    return KnownNumber(share, f"measured: {count_text(len(bodies), 'checkpoint')} of {opened.run.name}")


def read_measured(paths: Sequence[Path]) -> dict[str, MeasuredTime]:
    """Fit lines through the measurements in files of ``relight bench --json``. Raise ``ConfigError`` for other files."""
    points: dict[str, list[tuple[float, float]]] = {}
    for path in paths:
        try:
            result = json.loads(path.read_bytes() if path.stat().st_size <= _BYTES_MAX else b"")
            for name, figure in _FIGURES.items():
                seconds = [float(row["seconds"]) for row in result["relight"] if row["name"] == figure]
                points.setdefault(name, []).extend((float(result["state_bytes"]), value) for value in seconds)
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            hint = "relight bench STORE --json > FILE"
            raise ConfigError(
                f"it is not output of relight bench --json: {type(error).__name__}", where=str(path), hint=hint
            ) from None
    source = f"measured: {count_text(len(paths), 'file')} of relight bench"
    return {name: fit(points_of, source) for name, points_of in points.items()}


def show(plan: JobPlan, description: str) -> None:
    """Print the plan for people."""
    question = plan.question
    layout, state = question.layout, question.size
    spread = f"{count_text(layout.gpus)} GPUs on {count_text(layout.nodes)} nodes" if layout.gpus > 1 else "one GPU"
    click.echo(f"{paint('Plan', 'bold')} for {escape(description)}, {spread}")
    click.echo("\n".join(state.description.split("; ")) + "\n")
    rows: list[list[object]] = [
        [name, size_text(count), size_text(round(count / layout.gpus))] for name, count in state.parts.items()
    ]
    table(
        ["part", "bytes", "a GPU"],
        [*rows, ["checkpoint", size_text(state.bytes), size_text(round(state.bytes / layout.gpus))]],
        right=("bytes", "a GPU"),
    )
    click.echo()
    table(
        ["restored from", "of failures", "has a save after", "back after"],
        [
            [
                source.name,
                percent_text(source.share, 0),
                duration_text(source.has_after_s),
                duration_text(source.restart_s),
            ]
            for source in plan.sources
        ],
        right=("of failures", "has a save after", "back after"),
    )
    click.echo()
    facts_list([*_facts(plan), *((f"{name} a month", count_text(amount)) for name, amount in plan.month.items())])
    click.echo(f"\n{paint('Rests on', 'bold')}")
    table(
        ["number", "value", "source"],
        [[_LABELS[name], _value(name, known.value), known.source] for name, known in plan.known.items()],
        right=("value",),
    )


_LABELS = {
    "copy": "GPU to host, a second", "link": "node to node, a second", "store_write": "into the store, a second",
    "store_read": "from the store, a second", "start": "until processes are up", "mtbf": "between failures", "stall_s": "a save's stall",
    "durable_s": "a save until durable", "load_s": "a load", "stored": "stored of each byte",
}  # fmt: skip


def _value(name: str, value: float) -> str:
    if name == "stored":
        return percent_text(value)
    return (
        duration_text(value) if name in ("start", "mtbf", "stall_s", "durable_s", "load_s") else size_text(round(value))
    )


def _facts(plan: JobPlan) -> list[tuple[str, object]]:
    question = plan.question
    window, total = question.window_s, question.size.bytes
    stall, interval = plan.costs.stall_s, plan.best.seconds
    return [
        ("saves", f"every {duration_text(interval)}"),
        ("goodput", (f"{percent_text(plan.goodput, 2)} expected; "
         f"{percent_text(1 - plan.store_only.waste, 2)} if all restores read from the store")),
        ("stall", f"{duration_text(stall)} a save, {percent_text(stall / interval)} of the time"),
        ("host memory", f"{size_text(plan.host_bytes)} a node for snapshots"),
        ("write", (f"{rate_text(total / window)} for a save in {duration_text(window)}, "
         f"{rate_text(total / interval)} at one in {duration_text(interval)}")),
        ("read", f"{rate_text(plan.load_bytes / window)} for a load in {duration_text(window)}, {size_text(plan.load_bytes)} in all"),
        ("storage", f"{size_text(plan.kept_bytes)} for {question.kept} kept and one being written"),
        *_bounded(plan),
    ]  # fmt: skip


def _bounded(plan: JobPlan) -> list[tuple[str, object]]:
    """Return a row with the cost of the given bounds, if any."""
    question = plan.question
    bounds = [f"at_least={duration_text(question.at_least_s)}"] if question.at_least_s else []
    bounds += [f"at_most={duration_text(question.at_most_s)}"] if question.at_most_s is not None else []
    return [("bound", costly(", ".join(bounds), plan.bound_cost, plan.free.seconds))] if bounds else []


def to_dict(plan: JobPlan, description: str) -> dict[str, Any]:
    """Return the plan's fields for ``--json``."""
    question, layout = plan.question, plan.question.layout
    return {
        "model": description, "gpus": layout.gpus, "nodes": layout.nodes, "parts": dict(question.size.parts), "bytes": question.size.bytes,
        "goodput": plan.goodput, "stall_s": plan.costs.stall_s, "host_bytes": plan.host_bytes, "load_bytes": plan.load_bytes,
        "write_bytes_per_s": question.size.bytes / question.window_s, "read_bytes_per_s": plan.load_bytes / question.window_s,
        "window_s": question.window_s, "kept": question.kept, "kept_bytes": plan.kept_bytes, "month": plan.month,
        "store_only": {"interval_s": plan.store_only.seconds, "goodput": 1 - plan.store_only.waste},
        "interval_s": plan.best.seconds,
        "restored_from": [
            {"name": source.name, "share": source.share, "has_after_s": source.has_after_s, "restart_s": source.restart_s}
            for source in plan.sources
        ],
        "bound": {
            "at_least_s": question.at_least_s, "at_most_s": question.at_most_s, "cost": plan.bound_cost,
            "free_interval_s": plan.free.seconds, "free_goodput": 1 - plan.free.waste,
        },
        "known": {name: {"value": known.value, "source": known.source} for name, known in plan.known.items()},
    }  # fmt: skip
