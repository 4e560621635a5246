"""``relight show``."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Any

import click

from relight.catalog import open_checkpoint, read_tensors
from relight.catalog.opened import Opened
from relight.catalog.stats import tensor_stats
from relight.cli.common import choose, json_option, open_run_at
from relight.cli.ls import entry
from relight.cli.output import age, emit_json, escape, metrics_text, progress, size, table
from relight.format import Leaf, decode_tree
from relight.format.tree import join_path
from relight.layout import Bytes


@click.command("show")
@click.argument("path")
@click.argument("which", required=False)
@click.option("--only", multiple=True, help="Only tensors and values that match this pattern, such as 'model/*'.")
@click.option("--stats", is_flag=True, help="Read and verify each tensor; show min, max, mean, norm, non-finite values.")
@click.option("--values", is_flag=True, help="Show the plain values too.")
@json_option
def command(path: str, which: str | None, only: tuple[str, ...], stats: bool, values: bool, as_json: bool) -> None:
    """Show one checkpoint: by default the newest; WHICH is an id, a step, a tag, 'latest' or 'best'.

    \b
    relight show runs/demo
    relight show runs/demo 500 --only 'optimizer/*' --stats
    """
    run, view, history, place = open_run_at(path)
    one = choose(history, place, which)
    opened = open_checkpoint(run.store, run.name, one, store_id=view.store_id, run_id=view.run_id)
    tensors = _tensors(opened, only, stats)
    plain = [(name, value) for name, value in _values(opened) if _matches(name, only)]
    root = opened.root
    if as_json:
        facts = {
            **entry(history, one),
            "world": root.world,
            "components": root.components,
            "environment": root.environment,
            "user": root.user,
            "exact": root.exact,
            "tensors": tensors,
        }
        emit_json({**facts, "values": {name: _plain(value) for name, value in plain}} if values else facts)
        return
    click.echo(f"checkpoint {root.id}, step {root.step}, of run {run.name}, attempt {root.epoch}")
    facts_shown = [
        ("saved", f"{age(root.created)} ({root.created}), because: {root.reason}"),
        ("metrics", metrics_text(root.metrics) or "none"),
        ("tags", " ".join(history.tags_of(root.id)) or "none"),
        ("parents", " ".join(root.parents) or "none"),
        ("size", f"{size(root.logical_bytes)} of tensors, {size(root.stored_bytes)} stored"),
        ("made with", _software(root.environment)),
        ("exact", "; ".join(root.exact) or "to the bit, under the same software and settings"),
    ]
    for name, value in facts_shown:
        click.echo(f"  {name:10}{escape(value)}")
    click.echo()
    _tables(tensors, root.components, stats)
    if values:
        click.echo()
        table(["value", "is"], [[name, repr(value)[:200]] for name, value in plain])


def _tables(tensors: list[dict[str, Any]], components: dict[str, str], stats: bool) -> None:
    columns = ["tensor", "dtype", "shape", "size", *(["min", "max", "mean", "norm", "nonfinite"] if stats else [])]
    rows: list[list[object]] = []
    for name, kind in components.items():
        below = [t for t in tensors if t["name"] == name or t["name"].startswith(f"{name}/")]
        if not below:
            continue
        rows.append([f"{name} ({kind}): {len(below)} tensors", "", "", size(sum(t["bytes"] for t in below))])
        for tensor in below:
            row: list[object] = [f"  {tensor['name']}", tensor["dtype"], "×".join(map(str, tensor["shape"])) or "()", size(tensor["bytes"])]
            if stats:
                found = tensor.get("stats") or {}
                row += [f"{found[key]:.4g}" if key in found else "" for key in ("min", "max", "mean", "norm", "nonfinite")]
            rows.append(row)
    width = len(columns)
    table(columns, [[*row, *[""] * (width - len(row))] for row in rows], right=("size", "min", "max", "mean", "norm", "nonfinite"))


def _tensors(opened: Opened, only: tuple[str, ...], stats: bool) -> list[dict[str, Any]]:
    found = []
    chosen = [
        (part, index) for part in opened.parts for index, tensor in enumerate(part.tensors) if _matches(tensor.name, only)
    ]
    total = sum(part.tensors[index].length for part, index in chosen) if stats else 0
    with progress("reading", total) as advance:
        for part, index in sorted(chosen, key=lambda pair: pair[0].tensors[pair[1]].name):
            tensor = part.tensors[index]
            facts: dict[str, Any] = {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "bytes": tensor.length,
                "role": tensor.role,
                "rank": part.rank,
            }
            if stats:
                sink = Bytes(bytearray(tensor.length))
                read_tensors(opened, part, {index: sink})
                view = sink.view()
                facts["stats"] = tensor_stats(tensor.dtype, view) if view is not None else {}
                advance(tensor.length)
            found.append(facts)
    return found


def _values(opened: Opened) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, join_path(path, key))
        elif isinstance(node, (list, tuple)) and any(isinstance(item, (dict, list, tuple, Leaf)) for item in node):
            for index, value in enumerate(node):
                walk(value, join_path(path, index, sequence=True))
        elif not isinstance(node, Leaf):
            found.append((path, node))

    for part in opened.parts:
        walk(decode_tree(part.tree, len(part.tensors), lambda leaf, path: leaf, opened.prefix), "")
    return found


def _matches(name: str, only: tuple[str, ...]) -> bool:
    return not only or any(fnmatchcase(name, pattern) or fnmatchcase(name, f"{pattern}/*") for pattern in only)


def _plain(value: Any) -> Any:
    return value if isinstance(value, (str, int, float, bool, type(None))) and value == value else repr(value)


def _software(environment: dict[str, Any]) -> str:
    code = environment.get("code")
    revision = ""
    if isinstance(code, dict) and "commit" in code:
        revision = f", code {str(code['commit'])[:10]}{' + changes' if code.get('changes') else ''}"
    named = [f"{key} {environment[key]}" for key in ("relight", "torch", "python") if environment.get(key)]
    return (", ".join(named) or "unknown") + revision
