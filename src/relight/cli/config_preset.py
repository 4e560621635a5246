"""``relight config preset``: print a relight.toml for a kind of machine."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json, escape, table
from relight.cost_model.presets import SCENARIOS, preset
from relight.errors import ConfigError


@click.command("config preset")
@click.argument("name", required=False, type=click.Choice(list(SCENARIOS)), metavar="[NAME]")
@click.option("--model", metavar="N", help="Another number of parameters, such as 13B.")
@click.option("--gpus", type=click.IntRange(1, 10**7), metavar="N", help="Another number of GPUs.")
@click.option("--per-node", type=click.IntRange(1, 1024), metavar="N", help="GPUs of one machine.")
@click.option("--copies", default="", metavar="URL", help="For enterprise: the store for copies and the audit log.")
@click.option("--keys", default="", metavar="DIR", help="For enterprise: the directory of the key files.")
@click.option("--explain", is_flag=True, help="List the settings with their reasons, instead of the file.")
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    help="Write to this file, which must not exist.",
)
@json_option
def command(
    name: str | None,
    model: str | None,
    gpus: int | None,
    per_node: int | None,
    copies: str,
    keys: str,
    explain: bool,
    out: Path | None,
    as_json: bool,
) -> int:
    """Print a relight.toml for a kind of machine, computed by relight plan. Without NAME, list the presets.

    Its table [checkpoint] has the Checkpointer's defaults, which the script overrides; [supervise] is for relight run. Each line has the
    number that it results from.

    \b
    Examples:
      relight config preset medium > relight.toml
      relight config preset large --model 34B --gpus 512 --explain
    """
    if name is None:
        if as_json:
            emit_json([{"name": preset_name, "for": scenario.summary} for preset_name, scenario in SCENARIOS.items()])
        else:
            table(
                ["preset", "for"],
                [[preset_name, scenario.summary] for preset_name, scenario in SCENARIOS.items()],
                wrap=("for",),
            )
        return 0
    made = preset(name, model=model, gpus=gpus, per_node=per_node, copies=copies, keys=keys)
    if as_json:
        emit_json(
            {
                "name": name,
                "for": made.summary,
                "goodput": made.plan.goodput,
                "settings": [asdict(line) for line in made.lines],
                "toml": made.toml(),
            }
        )
    elif explain:
        click.echo(f"{name}: {made.summary}\n")
        for line in made.lines:
            click.echo(f"{line.table}.{line.key} = {line.value}\n    {line.why}")
    elif out is None:
        click.echo(made.toml(), nl=False)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(made.toml())
        except FileExistsError:
            raise ConfigError(
                "the file exists already", where=str(out), hint="remove it, or write to another file"
            ) from None
        click.echo(f"written to {escape(out)}", err=True)
    return 0
