"""``relight log``: show a run's history, record by record."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from relight.catalog.locate import locate
from relight.cli.common import OpenedRun, json_option, open_run_at
from relight.cli.output import Styled, emit_json, escape, paint, since, table, warn
from relight.errors import ConfigError
from relight.format import Record
from relight.format.records import FenceBody
from relight.log import Log, fold
from relight.log.record_text import record_text, writer_text
from relight.units import metrics_text
from relight.versions.lineage import Node, draw, lineage


@click.command("log")
@click.argument("path")
@click.option(
    "--graph", is_flag=True, help="Draw the lineage of checkpoints, newest first; for a store, of all its runs."
)
@click.option("--out", metavar="FILE", help="With --graph: write a picture (.png, .svg, .pdf).")
@click.option("--all", "whole", is_flag=True, help="Show every record, also those that a summary replaces.")
@json_option
def command(path: str, graph: bool, out: str | None, whole: bool, as_json: bool) -> None:
    """Show a run's log, oldest first: attempts, commits, tags, retired checkpoints, void and damaged records.

    In a long log, older records without effect are left out; --all shows them.

    \b
    Examples:
      relight log runs/demo
      relight log runs/demo --all
      relight log runs --graph --out lineage.svg
    """
    if out is not None and not graph:
        raise ConfigError("--out is for --graph")
    if graph:
        _graph(path, out, as_json)
        return
    opened = open_run_at(path, warnings=False)
    if whole and opened.view.summary is not None:
        view = Log(opened.run.store, opened.run.name, whole=True).read()
        opened = opened._replace(view=view, history=fold(view))
    void = {record.seq: reason for record, reason in opened.history.void}
    years = {record.time[:4] for record in opened.view.records}
    cut = 5 if len(years) == 1 else 0  # lines have 80 characters: a common year is in the heading
    lines = [
        (record.seq, _to_dict(record, void), _row(record, void, writer, cut))
        for record, writer in _with_writers(opened)
    ]
    for fault in opened.view.faults:
        facts = {"seq": fault.seq, "kind": "DAMAGED", "file": fault.file, "reason": fault.reason}
        cells: list[object] = [fault.seq, "", Styled("DAMAGED", "red"), Styled(f"{fault.file}: {fault.reason}", "red")]
        lines.append((fault.seq, facts, cells))
    lines.sort(key=lambda line: line[0])
    if as_json:
        emit_json([facts for _, facts, _ in lines])
    else:
        left_out = opened.view.counted - len(opened.view.records)
        if left_out:
            click.echo(f"{left_out} older records are left out: --all shows them")
        heading = f"{years.pop()} (UTC)" if cut else "time (UTC)"
        table(["seq", heading, "kind", "what"], [cells for _, _, cells in lines], right=("seq",), wrap=("what",))


def _graph(path: str, out: str | None, as_json: bool) -> None:
    place = locate(path)
    nodes, silent = lineage(place.store, place.run)
    for name, error in silent:
        warn(f"run {escape(name)} is left out: {escape(error.what)}")
    if out is not None:
        from relight.versions.picture import picture

        picture(nodes, out)
    if as_json:
        emit_json([node.to_dict() for node in nodes])
        return
    lines = draw(nodes)
    width = max((len(line.graph) for line in lines), default=0)
    runs = max((len(escape(node.run)) for node in nodes), default=0)
    steps = max((len(str(node.checkpoint.step)) for node in nodes), default=0)
    for line in lines:
        click.echo(line.graph if line.node is None else f"{line.graph.ljust(width)}  {_node(line.node, runs, steps)}")
    if not nodes:
        click.echo("no checkpoint yet")


def _node(node: Node, runs: int, steps: int) -> str:
    """Return the text of a node. ``runs`` and ``steps`` are the widths of their columns."""
    named = f"  ({', '.join(node.tags)})" if node.tags else ""
    flags = (" [set aside]" if node.set_aside else "") + (
        f" [{', '.join(node.begins)} begins here]" if node.begins else ""
    )
    what = f"{node.id}  {escape(node.run).ljust(runs)}  step {node.checkpoint.step:>{steps}}"
    tags = paint(escape(named), "green") if named else ""
    made, metrics = since(node.checkpoint.time), metrics_text(node.checkpoint.metrics)
    return f"{what}  {made:<14}  {metrics}".rstrip() + tags + escape(flags)


def _with_writers(opened: OpenedRun) -> list[tuple[Record, str]]:
    """Return each record with its writer; the writer is empty if it is the attempt in charge."""
    attempt = ""
    result = []
    for record in opened.view.records:
        if isinstance(record.body, FenceBody):
            attempt = record.writer
        result.append((record, "" if record.writer == attempt or record.seq == 0 else writer_text(record)))
    return result


def _to_dict(record: Record, void: dict[int, str]) -> dict[str, Any]:
    return {
        "seq": record.seq,
        "kind": record.kind,
        "time": record.time,
        "epoch": record.epoch,
        "writer": record.writer,
        "void": void.get(record.seq),
        "body": msgspec.to_builtins(record.body),
    }


def _row(record: Record, void: dict[int, str], writer: str, cut: int) -> list[object]:
    what = record_text(record) + (f" (by {writer})" if writer else "")
    time = record.time.removesuffix("Z").replace("T", " ")[cut:]
    if record.seq in void:
        return [record.seq, time, Styled(record.kind, "yellow"), Styled(f"VOID, {void[record.seq]}: {what}", "yellow")]
    style = "bold" if isinstance(record.body, FenceBody) else ""
    return [record.seq, time, Styled(record.kind, style), Styled(what, style)]
