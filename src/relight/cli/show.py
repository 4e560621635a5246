"""``relight show``: show one checkpoint: origin, notes, tensors, statistics."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import click

from relight.catalog.branches import PREFIX
from relight.cli.common import json_option, open_run_at
from relight.cli.ls import entry
from relight.cli.output import (
    Styled,
    code_text,
    emit_json,
    escape,
    facts_list,
    paint,
    since,
    table,
)
from relight.errors import CheckpointNotFound, ConfigError
from relight.format import Leaf, Root, Tensor, decode_tree
from relight.format.class_names import name_in, recorded_classes
from relight.format.root_keys import CLASSES, COMPACT, COPIED_FROM, MICRO_STEP, SUSPECT
from relight.format.tree import join_path
from relight.log import Checkpoint
from relight.observe.progress_bar import progress_bar
from relight.policy.best_by import BEST, selector
from relight.reader.opened import Opened
from relight.reader.spread import Pieces, numbers_of, pieces_named
from relight.reader.storage_stats import StoredAs, stored_as
from relight.run_records.verification import checked
from relight.units import count_text, metrics_text, percent_text, size_text, value_text
from relight.versions.describing import describe

STATS = ("min", "max", "mean", "norm", "nan", "inf")
ODD = ("nan", "inf")
"""Statistics that are shown as columns only if a value is not zero."""


@dataclass(slots=True)
class Row:
    """One tensor with all its ``pieces``: ``(rank, entry in that rank's part)``."""

    pieces: Pieces
    stats: dict[str, Any] | None = None

    @property
    def tensor(self) -> Tensor:
        """The first piece, for what all pieces have in common."""
        return self.pieces[0][1]

    @property
    def bytes(self) -> int:
        """Bytes of all pieces."""
        return sum(piece.length for _, piece in self.pieces)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields for ``--json``."""
        tensor = self.tensor
        facts: dict[str, Any] = {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "role": tensor.role,
        }
        facts["bytes"] = self.bytes
        boxes = [(rank, piece.box) for rank, piece in self.pieces]
        facts["pieces"] = [{"rank": rank, "box": box and [list(box.start), list(box.size)]} for rank, box in boxes]
        return facts if self.stats is None else {**facts, "stats": self.stats}


@click.command("show")
@click.argument("path")
@click.argument("which", required=False)
@click.option(
    "--only", multiple=True, metavar="PATTERN", help="Only what matches, such as 'model/*'; may be given several times."
)
@click.option(
    "--stats", "with_stats", is_flag=True, help="Read and verify the tensors: min, max, mean, norm, NaN, infinite."
)
@click.option(
    "--codecs", is_flag=True, help="Show how chunks are stored: coded, as differences, with earlier checkpoints."
)
@click.option("--values", is_flag=True, help="Also show plain values: step counts, random states, settings.")
@click.option("--metric", metavar="NAME", help="Metric of 'best', as in best:NAME. Default: the run's own metric.")
@click.option(
    "--mode", type=click.Choice(["min", "max"]), help="Whether a lower or higher value is better, as in best:NAME:MODE."
)
@json_option
def command(
    path: str,
    which: str | None,
    only: tuple[str, ...],
    with_stats: bool,
    codecs: bool,
    values: bool,
    metric: str | None,
    mode: str | None,
    as_json: bool,
) -> None:
    """Show one checkpoint, by default the newest: its origin, branches, stages, notes, position in the data, and tensors.

    WHICH is an id, a step, a tag, 'latest', 'best' or 'best:METRIC'. The name is RUN@TAG, or RUN@TAG+N for N checkpoints after the nearest
    tag.

    \b
    Examples:
      relight show runs/demo
      relight show runs/demo 500 --only 'optimizer/*' --stats
    """
    run_opened = open_run_at(path)
    if metric is not None or mode is not None:
        if (which or run_opened.which) != BEST:
            raise ConfigError(
                "--metric and --mode go with 'best'", hint=f"relight show {shlex.quote(path)} best --metric NAME"
            )
        which = selector(metric, mode)
    checkpoint = run_opened.choose(which)
    opened = run_opened.run.open(checkpoint)
    rows = _rows(opened, only)
    plain = [(name, value) for name, value in _values(opened) if _matches(name, only)] if values else []
    if only and not rows and not plain:
        among = "tensor or value" if values else "tensor"
        raise CheckpointNotFound(
            f"no {among} matches {' or '.join(only)}", where=opened.prefix, hint="without --only all are listed"
        )
    if with_stats:
        _read(opened, rows)
    root, known = opened.root, checked(run_opened.history).get(checkpoint.id)
    origin = describe(run_opened.view, run_opened.history, run_opened.run.name, opened)
    if as_json:
        facts = {
            **entry(run_opened.history, checkpoint, known),
            **origin,
            "world": root.world,
            "components": root.components,
            "environment": root.environment,
            "user": root.user,
            "exact": root.exact,
            "tensors": [row.to_dict() for row in rows],
        }
        facts |= {"codecs": [row.to_dict() for row in stored_as(opened)]} if codecs else {}
        emit_json({**facts, "values": dict(plain)} if values else facts)
        return
    click.echo(paint(f"checkpoint {root.id}: step {root.step} of {escape(run_opened.run.name)}", "bold"))
    facts_shown = [
        ("name", origin["name"]),
        ("saved", f"{since(root.created)}, {root.created}, by attempt {root.epoch}"),
        ("after", _after(checkpoint, root)),
        ("because", root.reason),
        ("metrics", metrics_text(checkpoint.metrics)),
        ("tags", " ".join(tag for tag in run_opened.history.tags_of(root.id) if not tag.startswith(PREFIX))),
        *_origin(origin, checkpoint.body.home),
        ("needs", " ".join(checkpoint.requires)),
        ("size", _sizes(root, checkpoint)),
        ("made with", _software(root.environment)),
        ("made on", _machine(root.environment, root.world)),
        ("started as", _command_line(root.environment.get("argv"))),
        ("data at", ", ".join(f"{name}={_cut(value)}" for name, value in list(origin["data"].items())[:8])),
        ("exact", "no: " + "; ".join(root.exact) if root.exact else "to the bit, under the same software and settings"),
        ("suspect", (SUSPECT.read(root.user) or "") if checkpoint.body.suspect else ""),
        (
            "damaged",
            f"{known.damage} (found by {known.by}, {since(known.at)})" if known is not None and known.damage else "",
        ),
        (
            "verified",
            f"{since(known.at)}, by {known.by}: every byte as committed"
            if known is not None and not known.damage
            else "",
        ),
        (
            "stored so",
            str((COMPACT.read(root.user) or {}).get("reason", "")) if _is_own(opened) else "",
        ),
        *(
            (f"user.{name}", str(value))
            for name, value in root.user.items()
            if name not in (SUSPECT.name, COMPACT.name, CLASSES.name)
        ),
        ("classes", ", ".join(f"{name} {name_in(path)}" for name, path in recorded_classes(root.user).items())),
    ]
    facts_list([(name, value) for name, value in facts_shown if value])
    click.echo()
    _table(rows, root.components, with_stats)
    if codecs:
        click.echo()
        _codecs(stored_as(opened))
    if values:
        click.echo()
        table(["value", "is"], [[name, repr(value)[:400]] for name, value in plain], wrap=("value", "is"))


def _origin(facts: dict[str, Any], home: str | None) -> list[tuple[str, str]]:
    """Return the rows about where the checkpoint comes from, what it led to, and what people recorded about it."""
    parents = [
        f"{parent['id']} (step {parent['step']})" if parent["step"] is not None else parent["id"]
        for parent in facts["origin"]
    ]
    moves = [f"{move['stage']} {since(move['time'])}" + _by(move["by"], move["why"]) for move in facts["promotions"]]
    return [
        ("from", " ".join(parents) or "nothing: a fresh run"),
        ("stored in", home if home and home != facts["run"] else ""),
        ("branches", ", ".join(facts["branches"])),
        ("promoted", "; ".join(moves)),
        *(("note", f"{note['text']}{_by(note['by'], '')}, {since(note['time'])}") for note in facts["notes"]),
    ]


def _command_line(argv: object) -> str:
    return " ".join(map(str, argv)) if isinstance(argv, list) else ""


def _by(who: str, why: str) -> str:
    return (f" by {who}" if who else "") + (f": {why}" if why else "")


def _cut(value: Any) -> str:
    text = value_text(value)
    return text if len(text) <= 60 else f"{text[:57]}…"


def _rows(opened: Opened, only: Sequence[str]) -> list[Row]:
    """Return the tensors with matching names, in the order of the first rank that has them."""
    return [Row(pieces) for pieces in pieces_named(opened, lambda name: _matches(name, only)).values()]


def _read(opened: Opened, rows: Sequence[Row]) -> None:
    """Read each chunk with bytes of the rows once, verified, and keep only the statistics."""
    with progress_bar("reading", sum(row.bytes for row in rows)) as meter:
        for row, numbers in zip(rows, numbers_of(opened, [row.pieces for row in rows], meter), strict=True):
            row.stats = numbers


def _table(rows: Sequence[Row], components: dict[str, str], with_stats: bool) -> None:
    """Print a heading with totals for each component, and its tensors below."""
    groups: dict[str, list[Row]] = {name: [] for name in components}
    for row in rows:
        groups.setdefault(row.tensor.name.split("/", 1)[0], []).append(row)
    shown = (
        [name for name in STATS if name not in ODD or any((row.stats or {}).get(name) for row in rows)]
        if with_stats
        else []
    )
    columns = ["tensor", "shape", *shown] if with_stats else ["tensor", "shape", "dtype", "size"]
    cells: list[list[object]] = []
    for name, members in groups.items():
        if not members:
            continue
        kind = f" ({components[name]})" if components.get(name, name) != name else ""
        count = sum(_elements(row.tensor) for row in members)
        total = size_text(sum(row.bytes for row in members))
        heading = [f"{name}{kind}", *([""] * (len(shown) + 1) if with_stats else [f"{count:,} in all", "", total])]
        alone = members[0].tensor.name == name  # a component that is one tensor needs no heading
        if not alone:
            cells.append([Styled(text, "bold") for text in heading])
        for row in members:
            tensor = row.tensor
            label: object = Styled(heading[0], "bold") if alone else f"  {tensor.name.split('/', 1)[1]}"
            pieces = f" in {len(row.pieces)} pieces" if len(row.pieces) > 1 else ""
            shape = "×".join(map(str, tensor.shape)) or "scalar"
            numbers = [_short((row.stats or {}).get(key)) for key in shown]
            cells.append([label, shape + pieces, *(numbers if with_stats else [tensor.dtype, size_text(row.bytes)])])
    if cells:
        table(columns, cells, right=("size", *STATS), wrap=("tensor", "shape"))
    held_bytes = sum(row.bytes for row in rows)
    sane = ", none NaN or infinite" if with_stats and not set(ODD) & set(shown) else ""
    elements = count_text(sum(_elements(row.tensor) for row in rows), "element")
    click.echo(f"{count_text(len(rows), 'tensor')}, {elements}, {size_text(held_bytes)}{sane}")


def _is_own(opened: Opened) -> bool:
    """Return whether this is not a copy: a copy's recorded reason for its codecs is about the original."""
    return COPIED_FROM.name not in opened.root.user


def _after(checkpoint: Checkpoint, root: Root) -> str:
    """Return how many steps of training the checkpoint has."""
    micro_step = MICRO_STEP.read(root.user)
    if micro_step is None:
        return count_text(checkpoint.body.steps_done, "step")
    return f"{count_text(checkpoint.body.steps_done - 1, 'step')} and {count_text(micro_step + 1, 'micro-batch')} of the next"


def _sizes(root: Root, checkpoint: Checkpoint) -> str:
    """Return the bytes of the tensors, and the bytes stored with this checkpoint and with those that it shares chunks with."""
    if checkpoint.self_contained or root.new_bytes == root.stored_bytes:
        return f"{size_text(root.logical_bytes)} of tensors, {size_text(checkpoint.new_bytes)} stored"
    stored = f"{size_text(root.new_bytes)} stored here; a restore reads {size_text(root.stored_bytes)}"
    return f"{size_text(root.logical_bytes)} of tensors, {stored}"


def _codecs(rows: Sequence[StoredAs]) -> None:
    """Print a line for each kind of chunk."""
    cells = [
        [row.dtype, row.role, row.chunks, size_text(row.bytes), size_text(row.new_bytes), percent_text(row.new_bytes / max(row.bytes, 1)),
         size_text(row.stored_bytes), row.coded, row.differences, row.elsewhere, row.derived]
        for row in rows
    ]  # fmt: skip
    columns = [
        "dtype",
        "role",
        "chunks",
        "bytes",
        "stored",
        "of it",
        "to read",
        "coded",
        "diffs",
        "elsewhere",
        "derived",
    ]
    right = tuple(columns[2:])
    if any(row.plugins for row in rows):
        columns.append("codecs")
        cells = [[*cell, row.plugins] for cell, row in zip(cells, rows, strict=True)]
    table(columns, cells, right=right)


def _elements(tensor: Tensor) -> int:
    return math.prod(tensor.shape)


def _short(value: float | None) -> str:
    """Return a number with three digits; ``--json`` has all of them."""
    return "" if value is None else f"{value:.3g}" if isinstance(value, float) or abs(value) >= 10**6 else str(value)


def _values(opened: Opened) -> list[tuple[str, Any]]:
    """Return plain values by path. A list of plain values is one value."""
    values: list[tuple[str, Any]] = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict) and node:
            for key, value in node.items():
                walk(value, join_path(path, key))
        elif isinstance(node, (list, tuple)) and any(isinstance(item, (dict, list, tuple, Leaf)) for item in node):
            for index, value in enumerate(node):
                walk(value, join_path(path, index, sequence=True))
        elif isinstance(node, Leaf):
            if not node.tensors:
                values.append((path, node.meta))
        else:
            values.append((path, node))

    for part in opened.parts:
        prefix = f"rank {part.rank}: " if len(opened.parts) > 1 else ""
        before = len(values)
        walk(decode_tree(part.tree, len(part.tensors), opened.prefix), "")
        values[before:] = [(prefix + path, value) for path, value in values[before:]]
    return values


def _matches(name: str, only: Sequence[str]) -> bool:
    return not only or any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in only)


def _software(environment: dict[str, Any]) -> str:
    named = [
        f"{key} {environment[key]}"
        for key in ("relight", "torch", "cuda", "rocm", "numpy", "python")
        if environment.get(key)
    ]
    code = environment.get("code")
    if isinstance(code, dict) and code.get("commit"):
        named.append(f"code {code_text(code)}")
    return ", ".join(named)


def _machine(environment: dict[str, Any], world: int) -> str:
    devices = environment.get("devices")
    listed = (
        [f"{devices.count(name)}× {name}" for name in dict.fromkeys(map(str, devices))]
        if isinstance(devices, list)
        else []
    )
    named = [str(environment[key]) for key in ("host", "machine") if environment.get(key)] + listed
    if environment.get("threads"):
        named.append(
            count_text(int(environment["threads"]), "thread") if isinstance(environment["threads"], int) else ""
        )
    ranks = f"{count_text(world, 'rank')}" if world > 1 else ""
    return ", ".join(part for part in (*named, ranks) if part)
