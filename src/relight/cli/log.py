"""``relight log``."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from relight.cli.common import json_option, open_run_at
from relight.cli.output import emit_json, metrics_text, size, table
from relight.format import Record
from relight.format.records import CommitBody, FenceBody, NoteBody, RetireBody, RunBody, TagBody


@click.command("log")
@click.argument("path")
@json_option
def command(path: str, as_json: bool) -> None:
    """Show a run's log, oldest first: attempts, commits, tags, what was retired and what is void.

    \b
    relight log runs/demo
    """
    _, view, history, _ = open_run_at(path)
    void = {record.seq: reason for record, reason in history.void}
    rows: list[dict[str, Any]] = [
        {
            "seq": record.seq,
            "kind": record.kind,
            "time": record.time,
            "epoch": record.epoch,
            "writer": record.writer,
            "void": void.get(record.seq),
            "body": msgspec.to_builtins(record.body),
        }
        for record in view.records
    ]
    rows += [{"seq": fault.seq, "kind": "DAMAGED", "file": fault.file, "reason": fault.reason} for fault in view.faults]
    rows.sort(key=lambda row: int(row["seq"]))
    if as_json:
        emit_json(rows)
        return
    records = {record.seq: record for record in view.records}
    table(
        ["seq", "time", "attempt", "kind", "what"],
        [
            [
                row["seq"],
                row.get("time", ""),
                row.get("epoch", ""),
                row["kind"] + (" (void)" if row.get("void") else ""),
                row.get("void") or row.get("reason") or _what(records[row["seq"]]),
            ]
            for row in rows
        ],
        right=("seq", "attempt"),
    )


def _what(record: Record) -> str:
    body = record.body
    if isinstance(body, CommitBody):
        return f"{body.id}, step {body.step}, {size(body.stored_bytes)}, {body.reason} {metrics_text(body.metrics)}".strip()
    if isinstance(body, RetireBody):
        return f"{' '.join(body.ids)}: {body.reason}"
    if isinstance(body, TagBody):
        return f"{body.name} → {body.id or 'removed'}"
    if isinstance(body, FenceBody):
        return f"{record.writer} took charge ({body.reason})"
    if isinstance(body, RunBody):
        return f"run {body.name}"
    return f"{body.topic}: {body.data}" if isinstance(body, NoteBody) else ""
