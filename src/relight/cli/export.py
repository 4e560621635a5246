"""``relight export``: export a checkpoint's model for other tools."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from typing import Any

import click

from relight.catalog.locate import locate_destination
from relight.cli.common import OpenedRun, engine_of, engine_options, json_option, open_run_at
from relight.cli.output import emit_json, escape, warn
from relight.engines import Engine
from relight.errors import ConfigError
from relight.export import (
    ExportPlan,
    ExportReport,
    Mixture,
    Options,
    ema_weights,
    execute_export,
    mixture,
    plan_export,
    save_average,
)
from relight.export.average import check_alike
from relight.export.convert import SHORT, dtype_meant
from relight.export.plan import FORMATS, facts, format_of, left_out
from relight.export.selection import choose
from relight.importers.hub import hub_address, is_hub
from relight.observe.progress_bar import progress_bar
from relight.reader.opened import Opened
from relight.settings.amounts import bytes_of
from relight.units import count_text, size_text

SHOWN = 8
"""Largest number of omitted items that are printed."""


_OPTIONS = (
    click.option("--to", type=click.Choice(FORMATS), help="Format; by default from TARGET's suffix, else safetensors."),
    click.option("--shard", metavar="SIZE", help="Several files of at most SIZE, and their index: 5GB."),
    click.option("--component", metavar="NAME", help="Which component; by default the model."),
    click.option("--all", "everything", is_flag=True, help="All components."),
    click.option("--only", multiple=True, metavar="GLOB", help="Only matching tensors: 'layers.0.*'. Repeatable."),
    click.option(
        "--rename",
        multiple=True,
        metavar="FROM=TO",
        help="Replace a prefix of names; re:PATTERN=TO: a regular expression.",
    ),
    click.option("--dtype", metavar="|".join(SHORT), help="Convert floats to this dtype, rounded to nearest."),
    click.option(
        "--tied",
        type=click.Choice(["first", "each"]),
        default="first",
        show_default=True,
        help="Names of tied weights.",
    ),
)


def export_options(command: Any) -> Any:
    """Add the options of what is exported, and how."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def options_of(
    target: str, to: str | None, shard: str | None, component: str | None, everything: bool, only: tuple[str, ...],
    rename: tuple[str, ...], dtype: str | None, tied: str, overwrite: bool,
) -> Options:  # fmt: skip
    """Return the options of an export."""
    return Options(
        to=to or format_of(target),
        shard_bytes=None if shard is None else bytes_of(shard, "--shard"),
        component=component,
        only=only,
        everything=everything,
        rename=rename,
        dtype=None if dtype is None else dtype_meant(dtype),
        tied=tied,
        overwrite=overwrite,
    )


@click.command("export")
@click.argument("source", metavar="SOURCE[@WHICH]")
@click.argument("target", required=False)
@export_options
@click.option("--average", metavar="SPEC", help="Average several: last:5, or WHICH[=WEIGHT],RUN@WHICH[=WEIGHT] ….")
@click.option("--ema", type=float, metavar="DECAY", help="Weigh each DECAY times as much as the next newer one.")
@click.option("--into", metavar="RUN", help="Save the average as a checkpoint of RUN, instead of exporting it.")
@click.option("--overwrite", is_flag=True, help="Replace what is there.")
@click.option("--public", is_flag=True, help="A new repository of the Hub is public; by default it is private.")
@click.option("--dry-run", is_flag=True, help="Only list what would be written.")
@engine_options()
@json_option
def command(
    source: str,
    target: str | None,
    to: str | None,
    shard: str | None,
    component: str | None,
    everything: bool,
    only: tuple[str, ...],
    rename: tuple[str, ...],
    dtype: str | None,
    tied: str,
    average: str | None,
    ema: float | None,
    into: str | None,
    overwrite: bool,
    public: bool,
    dry_run: bool,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> None:
    """Write a checkpoint's model to TARGET for other tools: a file (model.safetensors), a directory for from_pretrained, or
    a repository of the Hugging Face Hub (hf://ORG/NAME), with a model card.

    The newest checkpoint, or SOURCE@WHICH. Every byte is verified on the way; memory stays small. TARGET appears only when
    all of it is durable.

    \b
    Examples:
      relight export runs/demo@best model.safetensors
      relight export runs/demo out/ --shard 5GB --dtype bf16
      relight export runs/demo swa.safetensors --average last:5
    """
    opened = open_run_at(source)
    if (target is None) == (into is None) or (into is not None and average is None):
        raise ConfigError(
            "give TARGET, or --into with --average, and not both",
            hint="relight export RUN FILE; relight export RUN --average last:5 --into RUN",
        )
    options = options_of(target or "", to, shard, component, everything, only, rename, dtype, tied, overwrite)
    exported = opened.run.open(opened.choose(None)) if average is None else averaged(opened, average, ema)
    if target is None:
        assert into is not None and isinstance(exported, Mixture)
        _into(exported, into, options, dry_run, as_json)
        return
    if is_hub(target):
        _to_hub(exported, target, options, public, dry_run, engine_of(engine, jobs), as_json)
        return
    plan = plan_export(exported, target, options)
    if dry_run:
        _print_plan(plan, as_json)
        return
    with engine_of(engine, jobs) as workers, progress_bar("exporting", plan.bytes) as meter:
        report = execute_export(plan, meter, engine=workers)
    if as_json:
        emit_json(
            {
                **facts(plan),
                "dry_run": False,
                "overflowed": report.overflowed,
                "from_last": report.from_last,
                "seconds": report.seconds,
            }
        )
    else:
        print_report(plan, report)


def _to_hub(
    exported: Opened | Mixture,
    target: str,
    options: Options,
    public: bool,
    dry_run: bool,
    engine: Engine,
    as_json: bool,
) -> None:
    from relight.export.hub import export_to_hub, plan_hub_export

    address = hub_address(target)
    with tempfile.TemporaryDirectory() as folder:
        plan = plan_hub_export(exported, folder, options)
    if dry_run:
        _print_plan(replace(plan, path=str(address)), as_json)
        return
    with engine, progress_bar("exporting", plan.bytes) as meter:
        done = export_to_hub(exported, address, options, private=not public, progress=meter, engine=engine)
    if as_json:
        emit_json(
            {**facts(done.plan), "path": str(address), "commit": done.commit, "card": done.card, "dry_run": False}
        )
    else:
        print_report(replace(done.plan, path=str(address)), done.export)
        click.echo(f"commit: {escape(done.commit)}")


def averaged(opened_run: OpenedRun, spec: str, ema: float | None) -> Mixture:
    """Open the checkpoints of ``--average``, with the weights of ``--ema``: the last ones, oldest first, or those named, in order."""
    if spec.startswith("last:"):
        number = spec.removeprefix("last:")
        if not number.isdecimal() or int(number) < 2:
            raise ConfigError(f"{spec!r}: how many?", hint="last:5")
        live = [
            checkpoint
            for checkpoint in opened_run.history.live
            if checkpoint.id not in opened_run.history.rolled_back_ids
        ]
        if len(live) < int(number):
            raise ConfigError(f"{spec}: the run has {count_text(len(live), 'checkpoint')}", hint="request fewer")
        opened, weights = [opened_run.run.open(checkpoint) for checkpoint in live[-int(number) :]], [1.0] * int(number)
    else:
        opened, weights = [], []
        for item in spec.split(","):
            name, equals, weight = item.partition("=")
            place = open_run_at(name) if "@" in name else opened_run
            opened.append(place.run.open(place.choose(None if "@" in name else name)))
            try:
                weights.append(float(weight) if equals else 1.0)
            except ValueError:
                raise ConfigError(f"{item!r}: a weight is a number", hint="--average 1000=0.3,2000=0.7") from None
    if ema is not None:
        if len(set(weights)) > 1:
            raise ConfigError("--average with weights and --ema exclude each other")
        weights = ema_weights(len(opened), ema)
    return mixture(opened, weights)


def _into(mixed: Mixture, into: str, options: Options, dry_run: bool, as_json: bool) -> None:
    place = locate_destination(into, "average")
    assert place.run is not None
    if options.only or options.rename or options.dtype or options.to != "safetensors":
        raise ConfigError(
            "--into saves an average with the tensors and dtypes of the checkpoints",
            hint="leave --only, --rename, --dtype and --to away",
        )
    root = mixed.last.opened.root
    chosen = choose(mixed.last.whole.tree, mixed.last.whole.tensors, root.components, options)
    check_alike(mixed, chosen.entries)
    to = f"{place.store.url.rstrip('/')}/{place.run}"
    facts = {"to": to, "component": chosen.component, "average": mixed.to_record(), "dry_run": dry_run}
    if not as_json:
        _print_weights(mixed)
    if dry_run:
        if as_json:
            emit_json({**facts, "id": None})
        return
    total = sum(mixed.last.whole.tensors[number].length for number in {entry.tensor for entry in chosen.entries})
    with progress_bar("averaging", total * len(mixed.parts)) as meter:
        new = save_average(mixed, chosen.component, chosen.entries, place.store, place.run, meter)
    if as_json:
        emit_json({**facts, "id": new, "from_last": sorted(mixed.from_last)})
        return
    _print_from_last(sorted(mixed.from_last))
    click.echo(f"saved as {new} of {escape(into)}, step {root.step}")


def _print_weights(mixed: Mixture) -> None:
    for part in mixed.parts:
        click.echo(f"{part.opened.root.id}  step {part.opened.root.step:<9}  weight {part.weight:.6g}")


def _print_from_last(names: list[str]) -> None:
    for name in names[:SHOWN]:
        warn(f"{escape(name)} is not a float and differs between the checkpoints: the last checkpoint's value is used")
    if len(names) > SHOWN:
        warn(f"{len(names) - SHOWN} more have the last checkpoint's value")


def _print_plan(plan: ExportPlan, as_json: bool) -> None:
    if as_json:
        rows: list[dict[str, Any]] = [
            {"name": entry.name, "dtype": entry.dtype, "shape": list(entry.shape), "bytes": entry.length}
            for entry in plan.entries
        ]
        emit_json({**facts(plan), "dry_run": True, "entries": rows})
        return
    if plan.mixed is not None:
        _print_weights(plan.mixed)
    for file in plan.files:
        click.echo(f"{escape(file.name)}  {size_text(file.size)}")
    _print_rest(plan)
    click.echo(f"{_content_text(plan)} would be written to {escape(plan.path)}")


def print_report(plan: ExportPlan, report: ExportReport) -> None:
    """Print what was written."""
    if plan.mixed is not None:
        _print_weights(plan.mixed)
    _print_rest(plan)
    _print_from_last(report.from_last)
    for name, count in report.overflowed.items():
        warn(
            f"{count_text(count, 'value')} of {escape(name)} {'is' if count == 1 else 'are'} too large "
            f"for {plan.options.dtype}: infinite now"
        )
    files = "" if len(report.files) == 1 else f", in {len(report.files)} files"
    click.echo(f"{_content_text(plan)}, written to {escape(plan.path)}{files}")


def _content_text(plan: ExportPlan) -> str:
    root = plan.opened.root
    subject = (
        f"step {root.step} ({root.id})" if plan.mixed is None else f"an average of {len(plan.mixed.parts)} checkpoints"
    )
    return f"{count_text(len(plan.entries), 'tensor')} of {subject}, {size_text(plan.bytes_written)}"


def _print_rest(plan: ExportPlan) -> None:
    """Print tied names, and what is left out."""
    tied = [f"{entry.name} is {entry.alias}" for entry in plan.entries if entry.alias is not None]
    if tied:
        click.echo(f"tied: {escape(', '.join(tied[:SHOWN]))}{' …' if len(tied) > SHOWN else ''}")
    omitted = left_out(plan)
    for what, why in omitted[:SHOWN]:
        click.echo(f"left out: {escape(what)}: {escape(why)}")
    if len(omitted) > SHOWN:
        click.echo(f"left out: {len(omitted) - SHOWN} more; --dry-run --json lists them")
