"""``relight diff``: compare two checkpoints."""

from __future__ import annotations

import math
from typing import Any

import click

from relight.cli.common import engine_of, engine_options, json_option, open_run_at
from relight.cli.output import emit_json, escape, facts_list, paint, table
from relight.observe.progress_bar import progress_bar
from relight.reader.opened import Opened
from relight.units import count_text, percent_text, size_text, value_text
from relight.versions.difference import CHANGED, SAME, Difference, ValueChange, bytes_to_read, diff

_SHOWN = 20


@click.command("diff")
@click.argument("a", metavar="A")
@click.argument("b", metavar="B")
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Only what matches, such as 'model/*'; may be given several times."
)
@click.option("--no-tensors", is_flag=True, help="Read no tensor: list which have changed, not by how much.")
@click.option("--all", "everything", is_flag=True, help="List every change, not only the largest.")
@click.option("--values", is_flag=True, help="All plain values that have changed, such as counters and random states.")
@engine_options()
@json_option
def command(
    a: str,
    b: str,
    only: tuple[str, ...],
    no_tensors: bool,
    everything: bool,
    values: bool,
    engine: str | None,
    jobs: int | None,
    as_json: bool,
) -> int:
    """Compare two checkpoints: RUN for the newest of a run, or RUN@WHICH.

    Shows differences in settings, metrics, code and environment; tensors that are new, gone or of another shape; and for
    changed tensors the norm of the difference relative to A's norm (change), the largest difference, and the angle
    (1 − cosine). B may be in another store. Every byte that is read is verified. Exit code 1 if anything differs.

    \b
    Examples:
      relight diff runs/demo@1000 runs/demo@2000
      relight diff runs/demo@best runs/lower-lr --only 'model/*'
    """
    opened_a, opened_b = _opened(a), _opened(b)
    difference = diff(opened_a, opened_b, only=only, tensors=False)
    if not no_tensors:
        with engine_of(engine, jobs) as workers, progress_bar("comparing", bytes_to_read(difference)) as meter:
            difference = diff(opened_a, opened_b, only=only, progress=meter, engine=workers)
    if as_json:
        emit_json(_to_dict(opened_a, opened_b, difference))
    else:
        _show(opened_a, opened_b, difference, everything, values)
    return 0 if difference.is_none else 1


def _opened(path: str) -> Opened:
    opened = open_run_at(path)
    return opened.run.open(opened.choose(None))


def _to_dict(left: Opened, right: Opened, difference: Difference) -> dict[str, Any]:
    def change(value: ValueChange) -> dict[str, Any]:
        return {"path": value.path, "a": _plain(value.a), "b": _plain(value.b), "in_a": value.in_a, "in_b": value.in_b}

    return {
        "a": {"id": left.root.id, "step": left.root.step, "at": left.prefix},
        "b": {"id": right.root.id, "step": right.root.step, "at": right.prefix},
        "same": difference.is_none,
        "tensors": [tensor.to_dict() for tensor in difference.tensors],
        "layers": {name: apart.to_dict() for name, apart in difference.layers().items()},
        "values": [change(value) for value in difference.values],
        "facts": [change(value) for value in difference.facts],
        "bytes_read": difference.bytes_read,
    }


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None), list, dict)) else repr(value)


def _show(left: Opened, right: Opened, difference: Difference, everything: bool, all_values: bool) -> None:
    for name, side in (("a", left), ("b", right)):
        click.echo(
            paint(f"{name}  {side.root.id}: step {side.root.step} of {escape(side.prefix.partition('/')[0])}", "bold")
        )
    if difference.facts:
        facts_list([(value.path, _arrow(value)) for value in difference.facts])
    states: dict[str, int] = {}
    for tensor in difference.tensors:
        states[tensor.state] = states.get(tensor.state, 0) + 1
    click.echo(
        f"{count_text(len(difference.tensors), 'tensor')}: {', '.join(f'{count:,} {state}' for state, count in states.items()) or 'none'}"
    )
    for tensor in [tensor for tensor in difference.tensors if tensor.state not in (SAME, CHANGED)][
        : None if everything else _SHOWN
    ]:
        shapes = " → ".join(f"{side.dtype}{list(side.shape)}" for side in (tensor.a, tensor.b) if side is not None)
        click.echo(f"  {escape(tensor.name)}  {tensor.state}  {shapes}")
    changed = [tensor for tensor in difference.tensors if tensor.apart is not None and tensor.state == CHANGED]
    changed.sort(key=lambda tensor: -(math.inf if tensor.apart.relative is None else tensor.apart.relative))  # type: ignore[union-attr]
    layers = sorted(difference.layers().items(), key=lambda pair: -(pair[1].relative or 0.0))
    for title, rows in (("layer", layers), ("tensor", [(tensor.name, tensor.apart) for tensor in changed])):
        shown = rows if everything else rows[:_SHOWN]
        if shown and (title != "layer" or len(layers) > 1):
            table(
                [title, "change", "largest", "mean", "1−cosine", "elements changed"],
                [[name, *_numbers(apart)] for name, apart in shown if apart is not None],
                right=("change", "largest", "mean", "1−cosine", "elements changed"),
            )
            if len(rows) > len(shown):
                click.echo(f"  … and {len(rows) - len(shown):,} more that changed less: --all shows them")
    _show_values(difference, all_values)
    if left.root.step == right.root.step:
        _show_generators(difference)
    if difference.bytes_read:
        click.echo(f"{size_text(difference.bytes_read)} read and verified; what is the same was not")
    if difference.is_none:
        click.echo("tensors and values are the same, to the bit")


def _numbers(apart: Any) -> list[str]:
    odd = apart.odd_b - apart.odd_a
    share = percent_text(apart.changed / apart.elements) if apart.elements else ""
    change = "from 0" if apart.relative is None else percent_text(apart.relative)
    cosine = "" if apart.cosine is None else f"{1 - apart.cosine:.2g}"
    return [
        change,
        f"{apart.largest:.3g}",
        f"{apart.mean:.3g}",
        cosine,
        share + (f", {odd:+,} not finite" if odd else ""),
    ]


def _show_values(difference: Difference, everything: bool) -> None:
    shown = difference.values if everything else [value for value in difference.values if _is_short(value)][:_SHOWN]
    if shown:
        more = "" if len(shown) == len(difference.values) else "; --values shows all"
        click.echo(f"{count_text(len(difference.values), 'plain value')} changed{more}")
        facts_list([(value.path, _arrow(value)) for value in shown])


def _show_generators(difference: Difference) -> None:
    """State what a difference in generators means: at one step, two runs that began alike have the same generators."""
    changed = [tensor.name for tensor in difference.tensors if tensor.state != SAME] + [
        value.path for value in difference.values
    ]
    names = sorted({"/".join(name.split("/")[1:2]) for name in changed if name.startswith("rng/")})
    if names:
        click.echo(
            f"generators differ at the same step ({', '.join(names)}): the runs did not seed them equally, or drew other numbers"
        )


def _is_short(value: ValueChange) -> bool:
    return len(repr(value.a)) + len(repr(value.b)) < 80


def _arrow(value: ValueChange) -> str:
    sides = [_short(side) if present else "—" for side, present in ((value.a, value.in_a), (value.b, value.in_b))]
    return " → ".join(sides)


def _short(value: Any) -> str:
    text = value_text(value) if isinstance(value, float) else str(value) if isinstance(value, str) else repr(value)
    return text if len(text) <= 60 else f"{text[:40]}… ({len(text):,} characters)"
