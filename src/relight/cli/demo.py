"""``relight demo``: train, kill, resume, compare: see it work in two minutes."""

from __future__ import annotations

from pathlib import Path

import click

from relight.cli.common import json_option
from relight.cli.output import emit_json
from relight.demo import DemoOptions, run


@click.command("demo")
@click.option("--quick", is_flag=True, help="A smaller model, in under half a minute.")
@click.option("--seed", default=0, show_default=True, help="The same kills, data and curves again.")
@click.option(
    "--keep", type=click.Path(file_okay=False, path_type=Path), help="Keep the runs in this new or empty directory."
)
@click.option(
    "--out",
    type=click.Path(dir_okay=False, path_type=Path),
    default="relight-demo.png",
    show_default=True,
    help="The picture.",
)
@click.option("--device", default="cpu", show_default=True, help="Train on this device, such as cuda.")
@json_option
def command(quick: bool, seed: int, keep: Path | None, out: Path, device: str, as_json: bool) -> int:
    """Train a GPT twice, once in peace and once killed with SIGKILL again and again, also inside saves; compare to the bit.

    \b
    Examples:
      relight demo
      relight demo --quick --seed 7 --json
      relight demo --device cuda
    """
    report = run(DemoOptions(quick=quick, seed=seed, keep=keep, out=out, device=device))
    if as_json:
        emit_json(report.to_json())
    else:
        import rich

        rich.print(report)
    return 0 if report.ok else 1
