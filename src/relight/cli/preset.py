"""``relight preset``: a relight.toml for a machine, chosen by numbers."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json, escape, table
from relight.cost_model.presets import SCENARIOS, preset
from relight.errors import ConfigError


@click.command("preset")
@click.argument("name", required=False, type=click.Choice(list(SCENARIOS)), metavar="[NAME]")
@click.option("--model", metavar="N", help="Another number of parameters, such as 13B.")
@click.option("--gpus", type=click.IntRange(1, 10**7), metavar="N", help="Another number of them.")
@click.option("--per-node", type=click.IntRange(1, 1024), metavar="N", help="GPUs of one machine.")
@click.option("--copies", default="", metavar="URL", help="Of enterprise: where copies go, and the audit log next to them.")
@click.option("--keys", default="", metavar="DIR", help="Of enterprise: the directory of the key files.")
@click.option("--explain", is_flag=True, help="A table of settings with their reasons, in place of the file.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE", help="Write it there, unless there is one.")
@json_option
def command(
    name: str | None, model: str | None, gpus: int | None, per_node: int | None, copies: str, keys: str, explain: bool, out: Path | None,
    as_json: bool,
) -> int:  # fmt: skip
    """A relight.toml for a kind of machine, chosen by what relight plan works out. Without NAME: which there are.

    Its table [checkpoint] is what a Checkpointer does where the script does not say; [supervise] is for relight run. Each line says
    which number it comes from.

    \b
    Examples:
      relight preset medium > relight.toml
      relight preset large --model 34B --gpus 512 --explain
    """
    if name is None:
        if as_json:
            emit_json([{"name": one, "for": scenario.said} for one, scenario in SCENARIOS.items()])
        else:
            table(["preset", "for"], [[one, scenario.said] for one, scenario in SCENARIOS.items()], wrap=("for",))
        return 0
    found = preset(name, model=model, gpus=gpus, per_node=per_node, copies=copies, keys=keys)
    if as_json:
        emit_json(
            {
                "name": name,
                "for": found.said,
                "goodput": found.plan.goodput,
                "settings": [asdict(one) for one in found.lines],
                "toml": found.toml(),
            }
        )
    elif explain:
        click.echo(f"{name}: {found.said}\n")
        for one in found.lines:
            click.echo(f"{one.table}.{one.key} = {one.value}\n    {one.why}")
    elif out is None:
        click.echo(found.toml(), nl=False)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(found.toml())
        except FileExistsError:
            raise ConfigError("there is one already", where=str(out), hint="remove it, or write to another file") from None
        click.echo(f"written to {escape(out)}", err=True)
    return 0
